//! The connection to a server: every byte in a bounded time, every failure in a sentence.
//!
//! Never waits longer than the deadline without a byte moving. Time is counted in slices, so that a pause of this whole
//! process is not taken for one of the server.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{TcpStream, ToSocketAddrs},
    time::Duration,
};

use super::{RpcFailure, wire};

const SLICE: Duration = Duration::from_millis(50);

/// A connection to a server.
pub(super) struct Upstream {
    stream: TcpStream,
    deadline: Duration,
}

impl Upstream {
    /// Connects and shakes hands; how many devices the server has.
    pub fn open(endpoint: &str, deadline: Duration) -> Result<(Self, u32), RpcFailure> {
        let stream = connect(endpoint, deadline)?;
        let prepared = stream
            .set_nodelay(true)
            .and_then(|()| stream.set_read_timeout(Some(SLICE)))
            .and_then(|()| stream.set_write_timeout(Some(SLICE)));
        prepared.map_err(|e| RpcFailure::broken(&e))?;
        let mut upstream = Self { stream, deadline };
        let mut hello = [0; wire::HELLO_ANSWER];
        upstream.ask(wire::HELLO, &[0; wire::HELLO_REQUEST], &mut hello)?;
        if hello[0] != wire::MAJOR {
            return Err(RpcFailure::Protocol { theirs: hello[0], ours: wire::MAJOR });
        }
        let n_devices = upstream.n_devices()?;
        Ok((upstream, n_devices))
    }

    pub fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// Asks something that costs the server nothing.
    pub fn n_devices(&mut self) -> Result<u32, RpcFailure> {
        let mut count = [0; wire::DEVICE_COUNT_ANSWER];
        self.ask(wire::DEVICE_COUNT, &[], &mut count)?;
        match u32::from_le_bytes(count) {
            n @ 1..=64 => Ok(n),
            n => Err(RpcFailure::Devices(n)),
        }
    }

    fn ask(&mut self, command: u8, contents: &[u8], answer: &mut [u8]) -> Result<(), RpcFailure> {
        self.send(&wire::command(command, contents))?;
        let len = self.answer_len()?;
        if len != answer.len() as u64 {
            return Err(RpcFailure::Nonsense { got: len, want: answer.len() as u64 });
        }
        self.receive(answer)
    }

    /// The length of the answer that comes next.
    pub fn answer_len(&mut self) -> Result<u64, RpcFailure> {
        let mut len = [0; 8];
        self.receive(&mut len)?;
        Ok(u64::from_le_bytes(len))
    }

    pub fn send(&mut self, mut bytes: &[u8]) -> Result<(), RpcFailure> {
        let mut waited = Duration::ZERO;
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(0) => return Err(RpcFailure::Closed),
                Ok(n) => (bytes, waited) = (&bytes[n..], Duration::ZERO),
                Err(e) => self.wait(&e, &mut waited)?,
            }
        }
        Ok(())
    }

    pub fn receive(&mut self, bytes: &mut [u8]) -> Result<(), RpcFailure> {
        let mut waited = Duration::ZERO;
        let mut n_read = 0;
        while n_read < bytes.len() {
            match self.stream.read(&mut bytes[n_read..]) {
                Ok(0) => return Err(RpcFailure::Closed),
                Ok(n) => (n_read, waited) = (n_read + n, Duration::ZERO),
                Err(e) => self.wait(&e, &mut waited)?,
            }
        }
        Ok(())
    }

    /// Whether the server has closed the connection, or said something unasked.
    pub fn check(&mut self) -> Result<(), RpcFailure> {
        let peeked = self.stream.set_nonblocking(true).and_then(|()| self.stream.peek(&mut [0]));
        self.stream.set_nonblocking(false).map_err(|e| RpcFailure::broken(&e))?;
        match peeked {
            Ok(0) => Err(RpcFailure::Closed),
            Ok(_) => Err(RpcFailure::Unasked),
            Err(e) if is_pause(&e) => Ok(()),
            Err(e) => Err(RpcFailure::broken(&e)),
        }
    }

    fn wait(&self, error: &io::Error, waited: &mut Duration) -> Result<(), RpcFailure> {
        if error.kind() == ErrorKind::Interrupted {
            return Ok(());
        }
        if !is_pause(error) {
            return Err(RpcFailure::broken(error));
        }
        *waited += SLICE;
        if *waited < self.deadline {
            return Ok(());
        }
        Err(RpcFailure::Silent { deadline: self.deadline })
    }
}

pub(super) fn is_pause(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn connect(endpoint: &str, deadline: Duration) -> Result<TcpStream, RpcFailure> {
    let addresses = endpoint.to_socket_addrs().map_err(|e| RpcFailure::Unresolved(e.to_string()))?;
    let mut last = RpcFailure::Unresolved("it has no address".to_owned());
    for address in addresses {
        match TcpStream::connect_timeout(&address, deadline) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = RpcFailure::Unreachable(e.to_string()),
        }
    }
    Err(last)
}
