//! A server over fake workers, and a client that speaks plain HTTP/1.1.

use std::{
    fmt::Write as _,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::{Arc, Condvar, Mutex},
    thread::JoinHandle,
    time::Duration,
};

use eldr::{
    engine::{Engine, EngineParts, EngineWorker, Tokenizer},
    kv::ChunkCounts,
    route::LeastLoaded,
    schedule::{DispatchLimits, FakeModel, FakeRunner, ModelRunner, PrefixConfig, RunError, RunnerLayer},
    server::{Ended, ModelCard, Server, ServerConfig},
    types::{SamplingParams, Slot, Token},
};
use serde_json::Value;

pub const MODEL: FakeModel = FakeModel { n_vocab: 257, n_layer: 1, n_expert: 4, n_expert_used: 2 };
pub const N_CTX_SLOT: u32 = 512;

/// Token n + 1 is byte n; token 0 ends a text.
pub struct Bytes;

impl Tokenizer for Bytes {
    fn tokenize(&self, text: &str) -> Result<Vec<Token>, String> {
        Ok(text.bytes().map(|byte| Token::from(byte) + 1).collect())
    }

    fn piece(&self, token: Token) -> Vec<u8> {
        u8::try_from(token - 1).map(|byte| vec![byte]).unwrap_or_default()
    }

    fn end_tokens(&self) -> &[Token] {
        &[0]
    }

    fn n_tokens(&self) -> u32 {
        257
    }
}

/// What the model says to `prompt` with `seed`, and whether it ended by itself.
pub fn says(prompt: &str, seed: u64, max_tokens: u32) -> (String, u32, bool) {
    let sampling = SamplingParams { seed, ..SamplingParams::default() };
    let tokens = MODEL.complete(&Bytes.tokenize(prompt).unwrap(), &sampling, max_tokens);
    let bytes: Vec<u8> = tokens.iter().flat_map(|&token| Bytes.piece(token)).collect();
    let n = tokens.len() as u32;
    (String::from_utf8_lossy(&bytes).into_owned(), n, n < max_tokens)
}

/// A gate that workers pass when it is open.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    fn pass(&self) {
        let mut is_open = self.0.0.lock().unwrap();
        while !*is_open {
            is_open = self.0.1.wait(is_open).unwrap();
        }
    }
}

/// A fake worker whose prompts wait at a gate.
struct Gated(FakeRunner, Gate);

impl RunnerLayer for Gated {
    fn inner(&self) -> &dyn ModelRunner {
        &self.0
    }

    fn inner_mut(&mut self) -> &mut dyn ModelRunner {
        &mut self.0
    }

    fn prefill(
        &mut self,
        slot: Slot,
        tokens: &[Token],
        pos: u32,
        last: bool,
        counts: Option<&mut ChunkCounts>,
    ) -> Result<Option<Token>, RunError> {
        self.1.pass();
        self.0.prefill(slot, tokens, pos, last, counts)
    }
}

/// A running server. It stops when dropped.
pub struct World {
    pub address: SocketAddr,
    pub engine: Engine,
    pub gate: Gate,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<JoinHandle<Ended>>,
}

impl World {
    /// With open gates and default settings.
    pub fn start() -> Self {
        let world = Self::with(ServerConfig::default(), DispatchLimits::default(), ModelCard::default());
        world.gate.open();
        world
    }

    pub fn with(config: ServerConfig, limits: DispatchLimits, card: ModelCard) -> Self {
        let gate = Gate::default();
        let worker = |name: &str, gate: Option<&Gate>| {
            let runner = FakeRunner::new(MODEL, 8, N_CTX_SLOT, Vec::new());
            let runner: Box<dyn ModelRunner> = match gate {
                Some(gate) => Box::new(Gated(runner, gate.clone())),
                None => Box::new(runner),
            };
            EngineWorker { name: name.to_owned(), runner, permits: None }
        };
        let parts = EngineParts {
            prefill: vec![worker("prefill 0", Some(&gate))],
            decode: vec![worker("decode 0", None), worker("decode 1", None)],
            tokenizer: Arc::new(Bytes),
            policy: Box::new(LeastLoaded),
            calibration: None,
            limits,
            chunk: 64,
            n_expert: MODEL.n_expert,
            prefix: PrefixConfig::default(),
        };
        let engine = Engine::start(parts).unwrap();
        let card = ModelCard { id: "fake".to_owned(), ..card };
        let server = Server::new(engine.clone(), card, config).unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let (tell, address) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                tell.send(listener.local_addr().unwrap()).unwrap();
                server.serve(listener, async move { drop(stopped.await) }).await
            })
        });
        let address = address.recv().unwrap();
        Self { address, engine, gate, stop: Some(stop), thread: Some(thread) }
    }

    pub fn get(&self, path: &str) -> Reply {
        Reply::read(self.send("GET", path, "", &[]))
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_text(path, body.to_string().as_bytes())
    }

    pub fn post_text(&self, path: &str, body: &[u8]) -> Reply {
        Reply::read(self.send_bytes("POST", path, body, &[]))
    }

    pub fn send(&self, method: &str, path: &str, body: &str, headers: &[(&str, &str)]) -> TcpStream {
        self.send_bytes(method, path, body.as_bytes(), headers)
    }

    pub fn send_bytes(&self, method: &str, path: &str, body: &[u8], headers: &[(&str, &str)]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", self.address);
        for (name, value) in headers {
            write!(head, "{name}: {value}\r\n").unwrap();
        }
        write!(head, "Content-Length: {}\r\n\r\n", body.len()).unwrap();
        stream.write_all(head.as_bytes()).unwrap();
        // A body that is refused before its end may not be written whole.
        let _ = stream.write_all(body);
        stream
    }

    /// Asks the server to end; it drains from now on.
    pub fn stop(&mut self) {
        drop(self.stop.take());
    }

    /// Waits until the server has ended; says how it did.
    pub fn join(&mut self) -> Ended {
        self.thread.take().unwrap().join().unwrap()
    }

    /// Waits until no request is left; gives up after a long while.
    pub fn wait_idle(&self) -> bool {
        self.wait(|world| world.engine.stats().n_active == 0)
    }

    /// Waits until something holds; gives up after a long while, which a busy machine may need.
    pub fn wait(&self, holds: impl Fn(&Self) -> bool) -> bool {
        (0..6000).any(|_| {
            let does = holds(self);
            if !does {
                std::thread::sleep(Duration::from_millis(20));
            }
            does
        })
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.gate.open();
        self.stop();
        if let Some(thread) = self.thread.take() {
            // A test that failed has said so already.
            let _ = thread.join();
        }
    }
}

/// A whole answer.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Reply {
    pub fn read(stream: TcpStream) -> Self {
        let mut reader = BufReader::new(stream);
        let mut reply = Self::head(&mut reader);
        let mut bytes = Vec::new();
        // A server that refuses a body may close before it is read, which resets the connection.
        let _ = reader.read_to_end(&mut bytes);
        let is_chunked = reply.header("transfer-encoding") == Some("chunked");
        let bytes = if is_chunked { dechunk(&bytes) } else { bytes };
        reply.body = String::from_utf8(bytes).unwrap();
        reply
    }

    pub fn head(reader: &mut BufReader<TcpStream>) -> Self {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("no status in {line:?}")).parse().unwrap();
        let mut headers = Vec::new();
        loop {
            line.clear();
            reader.read_line(&mut line).unwrap();
            let Some((name, value)) = line.trim().split_once(": ") else { break };
            headers.push((name.to_lowercase(), value.to_owned()));
        }
        Self { status, headers, body: String::new() }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// The events of a stream, which must end with `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        let lines = self.body.lines().filter_map(|line| line.strip_prefix("data: "));
        let mut events: Vec<&str> = lines.collect();
        assert_eq!(events.pop(), Some("[DONE]"), "{}", self.body);
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }

    /// The text of choice `index` of a stream.
    pub fn streamed(&self, index: usize) -> String {
        let mut text = String::new();
        for event in self.events() {
            for choice in event["choices"].as_array().unwrap() {
                if choice["index"] == index {
                    text.push_str(choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or(""));
                }
            }
        }
        text
    }
}

fn dechunk(mut bytes: &[u8]) -> Vec<u8> {
    let mut whole = Vec::new();
    while let Some(end) = bytes.windows(2).position(|pair| pair == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        if size == 0 {
            break;
        }
        whole.extend_from_slice(&bytes[end + 2..end + 2 + size]);
        bytes = &bytes[end + 4 + size..];
    }
    whole
}
