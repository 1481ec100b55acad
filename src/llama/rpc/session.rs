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

use super::{pump::Pump, upstream::Upstream};

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
    pub fn fail(&self, reason: String) {
        if self.failure.set(reason).is_ok() {
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
    pub fn open(endpoint: &str, deadline: Duration) -> Result<Self, String> {
        // Closed again at once: a server has one client at a time.
        Upstream::open(endpoint, deadline)?;
        let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(|e| format!("no port for the relay: {e}"))?;
        let relay = listener.local_addr().map_err(|e| format!("no address for the relay: {e}"))?;
        let shared = Arc::new(Shared {
            endpoint: endpoint.to_owned(),
            deadline_ms: AtomicU64::new(0),
            failure: OnceLock::new(),
            over: AtomicBool::new(false),
        });
        let session = Self { shared: Arc::clone(&shared), relay };
        session.set_deadline(deadline);
        let accepting = thread::Builder::new().name("rpc relay".to_owned()).spawn(move || accept(&listener, &shared));
        accepting.map_err(|e| format!("no thread for the relay: {e}"))?;
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
