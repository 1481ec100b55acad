use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long the client that is served may be silent before a newcomer takes its place.
const SILENCE: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(50);

/// The door of an RPC server, which serves one client at a time and never notices that one is cut off: it lets the next
/// in once the last has left, or has been silent for ten seconds.
///
/// Never answers a client itself. eldr's own clients are never silent for longer than a second.
///
/// ```
/// use std::{
///     io::{Read, Write},
///     net::{TcpListener, TcpStream},
/// };
///
/// use eldr::engine::RpcFront;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // In front of any server; here one that is asked by hand.
/// let server = TcpListener::bind("127.0.0.1:0")?;
/// let front = RpcFront::bind("127.0.0.1:0")?;
/// let (inner, address) = (server.local_addr()?, front.address()?);
/// std::thread::spawn(move || front.run(inner));
///
/// let mut client = TcpStream::connect(address)?;
/// client.write_all(b"hello")?;
/// let (mut served, _) = server.accept()?;
/// let mut heard = [0; 5];
/// served.read_exact(&mut heard)?;
/// assert_eq!(&heard, b"hello");
/// # Ok(())
/// # }
/// ```
pub struct RpcFront {
    listener: TcpListener,
}

/// The connection that is served.
struct Guest {
    client: TcpStream,
    server: TcpStream,
    started: Instant,
    /// When a byte last came or went, in milliseconds since the start.
    heard: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
}

impl RpcFront {
    /// Listens at `endpoint` (`HOST:PORT`; port 0 takes a free one).
    pub fn bind(endpoint: &str) -> Result<Self, String> {
        let listener = TcpListener::bind(endpoint);
        listener.map(|listener| Self { listener }).map_err(|e| format!("cannot listen on {endpoint}: {e}"))
    }

    /// Where clients connect.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Lets clients in to the server at `inner`, one at a time, until listening fails.
    pub fn run(&self, inner: SocketAddr) -> io::Error {
        let mut guest: Option<Guest> = None;
        loop {
            let client = match self.listener.accept() {
                Ok((client, _)) => client,
                Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(e) => return e,
            };
            if wait_for_room(guest.as_ref(), &client) {
                guest =
                    Guest::let_in(client, inner).inspect_err(|e| log::warn!("a client could not be served: {e}")).ok();
            }
        }
    }
}

/// Waits until nobody is served any more; false if the newcomer left before.
fn wait_for_room(guest: Option<&Guest>, newcomer: &TcpStream) -> bool {
    let Some(guest) = guest else { return true };
    while !guest.over.load(Ordering::Acquire) {
        if guest.silence() >= SILENCE {
            log::warn!("a client was silent for {} s and makes room for the next", SILENCE.as_secs());
            guest.send_off();
        }
        if has_left(newcomer) {
            return false;
        }
        thread::sleep(LOOK);
    }
    true
}

fn has_left(client: &TcpStream) -> bool {
    let peeked = client.set_nonblocking(true).and_then(|()| client.peek(&mut [0]));
    let left = matches!(&peeked, Ok(0)) || peeked.is_err_and(|e| e.kind() != io::ErrorKind::WouldBlock);
    client.set_nonblocking(false).is_err() || left
}

impl Guest {
    fn let_in(client: TcpStream, inner: SocketAddr) -> io::Result<Self> {
        let server = TcpStream::connect(inner)?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let guest = Self {
            started: Instant::now(),
            heard: Arc::new(AtomicU64::new(0)),
            over: Arc::new(AtomicBool::new(false)),
            client: client.try_clone()?,
            server: server.try_clone()?,
        };
        let n_open = Arc::new(AtomicU64::new(2));
        for (from, to) in [(client.try_clone()?, server.try_clone()?), (server, client)] {
            let (heard, over, n_open) = (Arc::clone(&guest.heard), Arc::clone(&guest.over), Arc::clone(&n_open));
            let started = guest.started;
            thread::Builder::new().name("rpc front".to_owned()).spawn(move || {
                pass(&from, &to, || heard.store(started.elapsed().as_millis() as u64, Ordering::Relaxed));
                // Either way closed is both ways closed: there is nothing to be said any more.
                let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                if n_open.fetch_sub(1, Ordering::AcqRel) == 1 {
                    over.store(true, Ordering::Release);
                }
            })?;
        }
        Ok(guest)
    }

    fn silence(&self) -> Duration {
        self.started.elapsed().saturating_sub(Duration::from_millis(self.heard.load(Ordering::Relaxed)))
    }

    fn send_off(&self) {
        // Closed already, perhaps.
        let _ = (self.client.shutdown(Shutdown::Both), self.server.shutdown(Shutdown::Both));
    }
}

/// Moves bytes until one end is closed.
fn pass(mut from: &TcpStream, mut to: &TcpStream, heard: impl Fn()) {
    let mut piece = vec![0; 256 * 1024];
    loop {
        match from.read(&mut piece) {
            Ok(0) => return,
            Ok(n) => {
                heard();
                if to.write_all(&piece[..n]).is_err() {
                    return;
                }
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that gives back every byte, to one client at a time, and a front before it.
    fn echo() -> SocketAddr {
        let inner = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = inner.local_addr().expect("its address");
        thread::spawn(move || {
            for client in inner.incoming() {
                let client = client.expect("a client");
                pass(&client, &client, || {});
            }
        });
        let front = RpcFront::bind("127.0.0.1:0").expect("a port");
        let outer = front.address().expect("its address");
        thread::spawn(move || front.run(address));
        outer
    }

    fn talk(client: &mut TcpStream, text: &[u8]) -> Vec<u8> {
        client.write_all(text).expect("sent");
        let mut answer = vec![0; text.len()];
        client.read_exact(&mut answer).expect("an answer");
        answer
    }

    #[test]
    fn the_next_client_is_let_in_when_the_last_has_left() {
        let front = echo();
        let connect = || TcpStream::connect(front).expect("connected");
        let mut first = connect();
        assert_eq!(talk(&mut first, b"one"), b"one");
        let (gone, mut second) = (connect(), connect());
        drop(gone);
        drop(first);
        assert_eq!(talk(&mut second, b"two"), b"two");
    }

    // Symptom: after a cut cable the server went on waiting for a client that was long gone, and let nobody in.
    #[test]
    fn a_silent_client_makes_room() {
        let front = echo();
        let mut silent = TcpStream::connect(front).expect("connected");
        assert_eq!(talk(&mut silent, b"one"), b"one");
        let mut next = TcpStream::connect(front).expect("connected");
        assert_eq!(talk(&mut next, b"two"), b"two");
        assert_eq!(silent.read(&mut [0]).unwrap_or(0), 0, "sent off");
    }

    #[test]
    fn a_taken_port_is_told() {
        let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = taken.local_addr().expect("its address").to_string();
        let error = RpcFront::bind(&address).err().expect("refused");
        assert!(error.contains(&format!("cannot listen on {address}")), "{error}");
    }
}
