//! Moves commands from ggml's client to the server and answers back, and goes on alone once the server has failed.
//!
//! Never closes the connection to the client, which would end the process.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    time::Duration,
};

use super::{
    RpcFailure,
    session::Shared,
    upstream::{Upstream, is_pause},
    wire,
};

/// How often an idle connection is looked at, and after how many looks the server is asked whether it still answers.
const LOOK: Duration = Duration::from_millis(100);
const LOOKS_A_QUESTION: u32 = 10;
const PIECE: usize = 256 * 1024;
/// A command that wants an answer is shorter (an allocation size with all sources is 3 KiB).
const LONGEST_QUESTION: u64 = 64 * 1024;

/// One connection of ggml's client, and the one to the server that it stands for.
pub(super) struct Pump<'a> {
    client: TcpStream,
    /// None once it has failed.
    upstream: Option<Upstream>,
    shared: &'a Shared,
    piece: Vec<u8>,
}

/// The client is gone, or the session is to end.
struct Over;

impl From<io::Error> for Over {
    fn from(_: io::Error) -> Self {
        Self
    }
}

impl<'a> Pump<'a> {
    pub fn new(client: TcpStream, shared: &'a Shared) -> io::Result<Self> {
        client.set_nodelay(true)?;
        client.set_read_timeout(Some(LOOK))?;
        let mut pump = Self { client, upstream: None, shared, piece: Vec::with_capacity(PIECE) };
        if shared.failure().is_none() {
            match Upstream::open(shared.endpoint(), shared.deadline()) {
                Ok((upstream, _)) => pump.upstream = Some(upstream),
                Err(failure) => shared.fail(&failure),
            }
        }
        Ok(pump)
    }

    /// Until the client goes.
    pub fn run(mut self) {
        while self.step().is_ok() {}
    }

    /// One command.
    fn step(&mut self) -> Result<(), Over> {
        let mut header = [0; wire::HEADER];
        self.await_command(&mut header[..1])?;
        self.read_client(&mut header[1..])?;
        let command = header[0];
        let len = u64::from_le_bytes(header[1..].try_into().expect("eight bytes"));
        if !wire::is_known(command) {
            return Err(Over);
        }
        if let Some(upstream) = &mut self.upstream {
            upstream.set_deadline(self.shared.deadline());
        }
        if !wire::wants_answer(command) {
            return self.pass_on(&header, len);
        }
        if len > LONGEST_QUESTION {
            return Err(Over);
        }
        let mut message = vec![0; wire::HEADER + len as usize];
        message[..wire::HEADER].copy_from_slice(&header);
        self.read_client(&mut message[wire::HEADER..])?;
        let want = wire::answer_len(command, &message[wire::HEADER..]).ok_or(Over)?;
        // Neither end may take the connection over to another transport, which would go past the relay; and the hands
        // were shaken already.
        if command == wire::HELLO {
            return self.answer(command, want, 0);
        }
        self.tell_server(&message);
        self.pass_back(command, want)
    }

    /// Waits for the first byte of a command, and meanwhile sees to it that the server is there.
    fn await_command(&mut self, first: &mut [u8]) -> Result<(), Over> {
        let mut n_looks = 0;
        loop {
            match self.client.read(first) {
                Ok(0) => return Err(Over),
                Ok(_) => return Ok(()),
                Err(e) if is_pause(&e) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return Err(Over),
            }
            if self.shared.is_over() {
                return Err(Over);
            }
            n_looks += 1;
            let asks = n_looks % LOOKS_A_QUESTION == 0;
            self.with_server(|upstream| {
                upstream.check()?;
                if asks { upstream.n_devices().map(drop) } else { Ok(()) }
            });
        }
    }

    fn read_client(&mut self, mut bytes: &mut [u8]) -> Result<(), Over> {
        while !bytes.is_empty() {
            match self.client.read(bytes) {
                Ok(0) => return Err(Over),
                Ok(n) => bytes = &mut bytes[n..],
                Err(e) if is_pause(&e) || e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(Over),
            }
        }
        Ok(())
    }

    /// A command that wants no answer, of any length.
    fn pass_on(&mut self, header: &[u8], len: u64) -> Result<(), Over> {
        let mut piece = std::mem::take(&mut self.piece);
        piece.clear();
        piece.extend_from_slice(header);
        let mut rest = len;
        loop {
            let n = rest.min((PIECE - piece.len()) as u64) as usize;
            let start = piece.len();
            piece.resize(start + n, 0);
            self.read_client(&mut piece[start..])?;
            self.tell_server(&piece);
            rest -= n as u64;
            piece.clear();
            if rest == 0 {
                self.piece = piece;
                return Ok(());
            }
        }
    }

    /// The server's answer, or one in its place.
    fn pass_back(&mut self, command: u8, want: u64) -> Result<(), Over> {
        self.with_server(|upstream| match upstream.answer_len()? {
            got if got == want => Ok(()),
            got => Err(RpcFailure::Nonsense { got, want }),
        });
        if self.upstream.is_none() {
            return self.answer(command, want, 0);
        }
        let mut piece = std::mem::take(&mut self.piece);
        piece.clear();
        piece.extend_from_slice(&want.to_le_bytes());
        let mut done = 0;
        loop {
            let n = (want - done).min((PIECE - piece.len()) as u64) as usize;
            let start = piece.len();
            piece.resize(start + n, 0);
            self.with_server(|upstream| upstream.receive(&mut piece[start..]));
            if self.upstream.is_none() {
                // What has been read of this piece is not known: it is made up as a whole.
                self.client.write_all(&piece[..start])?;
                return self.fill(command, want, done);
            }
            self.client.write_all(&piece)?;
            piece.clear();
            done += n as u64;
            if done == want {
                self.piece = piece;
                return Ok(());
            }
        }
    }

    /// An answer made up from its byte `done` on; with its length in front if that is the first.
    fn answer(&mut self, command: u8, want: u64, done: u64) -> Result<(), Over> {
        self.client.write_all(&want.to_le_bytes())?;
        self.fill(command, want, done)
    }

    fn fill(&mut self, command: u8, want: u64, done: u64) -> Result<(), Over> {
        let mut start = wire::made_up(command);
        start.resize(start.len().max(usize::try_from(want.min(4096)).expect("small")), 0);
        let mut done = done;
        if done < start.len() as u64 {
            self.client.write_all(&start[done as usize..])?;
            done = start.len() as u64;
        }
        let zeros = vec![0; PIECE.min((want - done) as usize)];
        while done < want {
            let n = (want - done).min(PIECE as u64) as usize;
            self.client.write_all(&zeros[..n])?;
            done += n as u64;
        }
        Ok(())
    }

    fn tell_server(&mut self, bytes: &[u8]) {
        self.with_server(|upstream| upstream.send(bytes));
    }

    /// Does something with the server, if it has not failed; a failure is the end of it.
    fn with_server(&mut self, body: impl FnOnce(&mut Upstream) -> Result<(), RpcFailure>) {
        let Some(upstream) = &mut self.upstream else { return };
        let done = match self.shared.failure() {
            Some(_) => Err(RpcFailure::Elsewhere),
            None => body(upstream),
        };
        if let Err(failure) = done {
            // Known before the client sees a byte that did not come from the server.
            self.shared.fail(&failure);
            self.upstream = None;
        }
    }
}
