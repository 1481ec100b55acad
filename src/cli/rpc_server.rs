//! `eldr rpc-server`: lends a device of this machine to another machine's eldr.
//!
//! Never computes in this process: ggml's server ends its process over a message it does not understand, so it runs in a
//! child, which is started again.

use std::{
    env, io,
    net::{SocketAddr, TcpListener, TcpStream},
    num::NonZero,
    process::{Child, ChildStdin, Command, Stdio},
    thread,
    time::Duration,
};

use clap::Args;
use eldr::engine::{self, RpcFront, threads_alone};
use serde_json::json;

use super::{
    error::CliError,
    output::{Output, end_now, note},
};

#[derive(Debug, Clone, Args)]
pub struct RpcServerArgs {
    /// Address to listen on; this machine alone can reach the default. Port 0 takes a free one
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:50052")]
    listen: String,
    /// Device to lend, by ggml's name or number
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: String,
    /// CPU threads it computes with; by default all cores but one
    #[arg(short, long, value_name = "N")]
    threads: Option<u32>,
    /// Print one JSON document once listening
    #[arg(long)]
    pub json: bool,
    /// Be the child that serves at this address, until standard input is closed
    #[arg(long, value_name = "HOST:PORT", hide = true)]
    inner: Option<String>,
}

/// Between two starts of the child, and how long it may take to listen.
const PAUSE: Duration = Duration::from_secs(1);
const START_LIMIT: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(50);

impl RpcServerArgs {
    pub fn run(&self, output: &mut Output) -> Result<(), CliError> {
        let n_threads = self.threads.unwrap_or_else(threads_alone);
        if n_threads == 0 {
            return Err(CliError::usage("--threads is 0: give at least 1"));
        }
        let n_cores = thread::available_parallelism().map_or(1, NonZero::get);
        if n_threads as usize > n_cores {
            let why = "more would wait for each other";
            return Err(CliError::usage(format!("--threads is {n_threads}, and there are {n_cores} cores: {why}")));
        }
        if let Some(inner) = &self.inner {
            end_with_stdin();
            return Ok(engine::serve_rpc(inner, &self.device, n_threads)?);
        }
        let device = self.lent()?;
        let front =
            RpcFront::bind(&self.listen).map_err(|why| CliError::usage(format!("{why}; choose another --listen")))?;
        let address = front.address().map_err(|e| CliError::failed(e.to_string()))?;
        let inner = free_port().map_err(|e| CliError::failed(format!("no port for the server: {e}")))?;
        let mut child = self.start(inner, n_threads)?;
        if !address.ip().is_loopback() {
            note(
                "the RPC protocol has neither passwords nor encryption: whoever reaches this port can use the device and \
                 read what is computed on it; open it to a trusted network only",
            );
        }
        output.line(&format!("serving {device} with {n_threads} threads on {address}: --decode 1@rpc:{address}"))?;
        output.json(&json!({ "listening": address.to_string(), "device": device, "threads": n_threads }))?;
        let args = self.clone();
        thread::spawn(move || {
            loop {
                let ended = child.0.wait();
                log::warn!("the server ended ({}) and is started again", said(ended));
                thread::sleep(PAUSE);
                match args.start(inner, n_threads) {
                    Ok(again) => child = again,
                    Err(error) => log::error!("{}", error.message),
                }
            }
        });
        let ended = front.run(inner);
        Err(CliError::failed(format!("listening on {address} failed: {ended}")))
    }

    /// The name of the device to lend: one of this machine.
    fn lent(&self) -> Result<String, CliError> {
        let info = engine::device(&self.device).map_err(|error| CliError::usage(error.to_string()))?;
        Ok(info.name)
    }

    /// Starts the child and waits until it listens.
    fn start(&self, inner: SocketAddr, n_threads: u32) -> Result<Inner, CliError> {
        let program = env::current_exe().map_err(|e| CliError::failed(format!("cannot find this program: {e}")))?;
        let child = Command::new(program)
            .args(["rpc-server", "--inner", &inner.to_string(), "--device", &self.device])
            .args(["--threads", &n_threads.to_string()])
            .stdin(Stdio::piped())
            // ggml's server talks on standard output, which is ours.
            .stdout(Stdio::null())
            .spawn()
            .map_err(|e| CliError::failed(format!("cannot start the server: {e}")))?;
        let mut child = Inner::of(child);
        let mut waited = Duration::ZERO;
        loop {
            if let Ok(Some(status)) = child.0.try_wait() {
                return Err(CliError::failed(format!("the server did not start ({status}): its reason is above")));
            }
            if TcpStream::connect(inner).is_ok() {
                return Ok(child);
            }
            if waited > START_LIMIT {
                return Err(CliError::failed("the server does not listen".to_owned()));
            }
            thread::sleep(LOOK);
            waited += LOOK;
        }
    }
}

/// The child; it ends with us, whose end closes its standard input.
struct Inner(Child, #[expect(dead_code, reason = "held open; waiting for a child would close it")] Option<ChildStdin>);

impl Inner {
    fn of(mut child: Child) -> Self {
        let stdin = child.stdin.take();
        Self(child, stdin)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Gone already, perhaps.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn said(ended: io::Result<std::process::ExitStatus>) -> String {
    ended.map_or_else(|e| e.to_string(), |status| status.to_string())
}

fn free_port() -> io::Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")?.local_addr()
}

/// Ends this process when the one that started it is gone, however that ended.
fn end_with_stdin() {
    thread::spawn(|| {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        end_now(0);
    });
}
