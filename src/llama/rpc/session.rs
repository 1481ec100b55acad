//! One life of a remote device: from the first connection to its server until that fails.
//!
//! Never revives: a server that comes back gets another session.

use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use super::{RpcFailure, pump::Pump, upstream::Upstream};

/// What the relay's threads and the owner of the session share.
pub(super) struct Shared {
    endpoint: String,
    deadline_ms: AtomicU64,
    failure: OnceLock<String>,
    over: AtomicBool,
}

impl Shared {
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    pub fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms.load(Ordering::Relaxed))
    }

    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// The first failure is the one that counts.
    pub fn fail(&self, failure: &RpcFailure) {
        if self.failure.set(failure.to_string()).is_ok() {
            log::warn!("the RPC server {} has failed: {}", self.endpoint, self.failure().unwrap_or_default());
        }
    }

    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }
}

/// A relay on loopback in front of an RPC server.
pub(in crate::llama) struct Session {
    shared: Arc<Shared>,
    relay: SocketAddr,
}

impl Session {
    /// Looks whether an RPC server answers at `endpoint` (`host:port`), each question within `deadline`, and starts a
    /// relay in front of it.
    pub fn open(endpoint: &str, deadline: Duration) -> Result<Self, RpcFailure> {
        // Closed again at once: a server has one client at a time.
        Upstream::open(endpoint, deadline)?;
        let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(RpcFailure::relay("port"))?;
        let relay = listener.local_addr().map_err(RpcFailure::relay("address"))?;
        let shared = Arc::new(Shared {
            endpoint: endpoint.to_owned(),
            deadline_ms: AtomicU64::new(0),
            failure: OnceLock::new(),
            over: AtomicBool::new(false),
        });
        let session = Self { shared: Arc::clone(&shared), relay };
        session.set_deadline(deadline);
        let accepting = thread::Builder::new().name("rpc relay".to_owned()).spawn(move || accept(&listener, &shared));
        accepting.map_err(RpcFailure::relay("thread"))?;
        Ok(session)
    }

    /// Where ggml's client connects.
    pub fn relay(&self) -> String {
        self.relay.to_string()
    }

    /// The server.
    pub fn endpoint(&self) -> &str {
        self.shared.endpoint()
    }

    /// The longest the server may keep a byte waiting, from now on.
    pub fn set_deadline(&self, deadline: Duration) {
        let ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        self.shared.deadline_ms.store(ms.max(1), Ordering::Relaxed);
    }

    /// Why nothing that was computed since can be used; none while the server is well. Set for good, and before the
    /// first byte that did not come from the server.
    pub fn failure(&self) -> Option<&str> {
        self.shared.failure()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts; if that fails, it is gone.
        drop(TcpStream::connect_timeout(&self.relay, Duration::from_secs(1)));
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for client in listener.incoming() {
        if shared.is_over() {
            return;
        }
        let Ok(client) = client else { continue };
        let shared = Arc::clone(shared);
        let pumping = thread::Builder::new().name("rpc pump".to_owned()).spawn(move || {
            if let Ok(pump) = Pump::new(client, &shared) {
                pump.run();
            }
        });
        if let Err(error) = pumping {
            log::error!("no thread for a connection of the relay: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;
    use crate::llama::rpc::wire;

    const GET_ALIGNMENT: u8 = 1;
    const GET_TENSOR: u8 = 8;
    const GRAPH_COMPUTE: u8 = 10;
    const ALLOC_BUFFER: u8 = 0;

    /// What a server does when it is asked for an alignment or a tensor.
    #[derive(Clone, Copy)]
    enum Answers {
        Well,
        WithNonsense,
        /// Half of a tensor, then nothing any more.
        HalfOfIt,
        Never,
    }

    /// A server in a thread.
    fn server(answers: Answers) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let endpoint = listener.local_addr().expect("its address").to_string();
        thread::spawn(move || {
            for client in listener.incoming() {
                // A client that leaves ends its connection only.
                let _ = serve(client.expect("a client"), answers);
            }
        });
        endpoint
    }

    fn serve(mut client: TcpStream, answers: Answers) -> std::io::Result<()> {
        let say = |client: &mut TcpStream, bytes: &[u8]| {
            client.write_all(&(bytes.len() as u64).to_le_bytes())?;
            client.write_all(bytes)
        };
        loop {
            let mut header = [0; wire::HEADER];
            client.read_exact(&mut header)?;
            let mut contents = vec![0; u64::from_le_bytes(header[1..].try_into().expect("eight")) as usize];
            client.read_exact(&mut contents)?;
            match (header[0], answers) {
                (wire::HELLO, _) => say(&mut client, &[&[wire::MAJOR][..], &[0; 27]].concat())?,
                (wire::DEVICE_COUNT, _) => say(&mut client, &1u32.to_le_bytes())?,
                (GET_ALIGNMENT, Answers::Well) => say(&mut client, &32u64.to_le_bytes())?,
                (GET_ALIGNMENT, Answers::WithNonsense) => say(&mut client, &[1, 2, 3])?,
                (GET_TENSOR, Answers::Well) => say(&mut client, &vec![7; N_TENSOR])?,
                (GET_TENSOR, Answers::HalfOfIt) => {
                    client.write_all(&(N_TENSOR as u64).to_le_bytes())?;
                    client.write_all(&vec![7; N_TENSOR / 2])?;
                    return Ok(());
                }
                (GET_ALIGNMENT | GET_TENSOR, _) => thread::sleep(Duration::from_secs(60)),
                _ => {}
            }
        }
    }

    const N_TENSOR: usize = 1_000_000;

    struct Client(TcpStream);

    impl Client {
        fn of(session: &Session) -> Self {
            let mut client = Self(TcpStream::connect(session.relay()).expect("the relay"));
            let hello = client.ask(wire::HELLO, &[0; wire::HELLO_REQUEST]);
            assert_eq!((hello.len(), hello[0]), (wire::HELLO_ANSWER, wire::MAJOR));
            client
        }

        fn ask(&mut self, command: u8, contents: &[u8]) -> Vec<u8> {
            self.0.write_all(&wire::command(command, contents)).expect("sent");
            let mut len = [0; 8];
            self.0.read_exact(&mut len).expect("a length");
            let mut answer = vec![0; u64::from_le_bytes(len) as usize];
            self.0.read_exact(&mut answer).expect("an answer");
            answer
        }

        fn tensor(&mut self) -> Vec<u8> {
            self.ask(GET_TENSOR, &[&[0; 304][..], &(N_TENSOR as u64).to_le_bytes()].concat())
        }
    }

    fn open(answers: Answers) -> (Session, Client) {
        let session = Session::open(&server(answers), Duration::from_millis(300)).expect("a session");
        let client = Client::of(&session);
        (session, client)
    }

    fn number(bytes: &[u8]) -> u64 {
        u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
    }

    /// Once a server has failed, everything is answered at once, and nothing comes from it.
    fn goes_on(session: &Session, client: &mut Client, why: &str) {
        assert!(session.failure().expect("failed").contains(why), "{:?}", session.failure());
        assert_eq!(number(&client.ask(GET_ALIGNMENT, &[0; 4])), 128);
        client.0.write_all(&wire::command(GRAPH_COMPUTE, &vec![0; 3_000_000])).expect("swallowed");
        assert_eq!(client.ask(ALLOC_BUFFER, &[0; 12]), [0; 16], "no memory any more");
        assert!(client.tensor().iter().all(|&byte| byte == 0));
        let mut another = Client::of(session);
        assert_eq!(another.tensor().len(), N_TENSOR);
    }

    #[test]
    fn a_server_that_is_well_is_passed_on() {
        let (session, mut client) = open(Answers::Well);
        assert_eq!(number(&client.ask(GET_ALIGNMENT, &[0; 4])), 32);
        client.0.write_all(&wire::command(GRAPH_COMPUTE, &vec![0; 3_000_000])).expect("passed on");
        assert_eq!(client.tensor(), vec![7; N_TENSOR]);
        assert_eq!(session.failure(), None);
    }

    #[test]
    fn an_answer_of_the_wrong_length_is_a_failure() {
        let (session, mut client) = open(Answers::WithNonsense);
        assert_eq!(number(&client.ask(GET_ALIGNMENT, &[0; 4])), 128);
        goes_on(&session, &mut client, "3 bytes where 8 are due");
    }

    #[test]
    fn an_answer_that_breaks_off_is_filled_up() {
        let (session, mut client) = open(Answers::HalfOfIt);
        let tensor = client.tensor();
        assert_eq!((tensor.len(), tensor[0], tensor[N_TENSOR - 1]), (N_TENSOR, 7, 0));
        goes_on(&session, &mut client, "closed the connection");
    }

    #[test]
    fn a_server_that_hangs_is_given_up() {
        let (session, mut client) = open(Answers::Never);
        assert_eq!(client.tensor(), vec![0; N_TENSOR]);
        goes_on(&session, &mut client, "did not answer within 0.3 s");
    }

    #[test]
    fn a_server_that_leaves_while_nobody_asks_is_missed() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let endpoint = listener.local_addr().expect("its address").to_string();
        let (leave, left) = std::sync::mpsc::channel();
        thread::spawn(move || {
            // The look at it, and then the connection, which is closed when told.
            let (client, _) = listener.accept().expect("a client");
            let _ = serve(client, Answers::Well);
            let (client, _) = listener.accept().expect("a client");
            let closing = client.try_clone().expect("a handle");
            thread::spawn(move || drop(serve(client, Answers::Well)));
            left.recv().expect("told");
            closing.shutdown(std::net::Shutdown::Both).expect("closed");
        });
        let session = Session::open(&endpoint, Duration::from_secs(5)).expect("a session");
        let client = Client::of(&session);
        leave.send(()).expect("told");
        for _ in 0..100 {
            if session.failure().is_some() {
                break;
            }
            thread::sleep(Duration::from_millis(50));
        }
        assert!(session.failure().is_some_and(|why| why.contains("closed the connection")));
        drop(client);
    }

    #[test]
    fn what_is_no_rpc_server_is_refused_with_a_reason() {
        let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
        let open = |endpoint: &str| Session::open(endpoint, Duration::from_millis(200)).err().expect("refused");
        let reason = open(&silent.local_addr().expect("its address").to_string());
        assert!(matches!(reason, RpcFailure::Silent { .. }), "{reason}");
        let web = TcpListener::bind("127.0.0.1:0").expect("a port");
        let endpoint = web.local_addr().expect("its address").to_string();
        thread::spawn(move || {
            let (mut client, _) = web.accept().expect("a client");
            let _ = client.read(&mut [0; 64]);
            let _ = client.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        });
        let reason = open(&endpoint);
        assert!(matches!(reason, RpcFailure::Nonsense { .. }), "{reason}");
    }
}
