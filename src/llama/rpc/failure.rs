//! Why an RPC server can not be used, or not any more.
//!
//! Never says which server: whoever asked knows.

use std::{io, time::Duration};

/// What a server, or the way to it, did.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(in crate::llama) enum RpcFailure {
    /// The host has no address.
    #[error("cannot resolve the host: {0}")]
    Unresolved(String),
    /// Nobody takes the connection.
    #[error("no server answers: {0}")]
    Unreachable(String),
    /// The connection stands, and no byte came or went for too long.
    #[error("the server did not answer within {:.1} s", deadline.as_secs_f64())]
    Silent {
        /// For how long.
        deadline: Duration,
    },
    /// It closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// The system ended the connection.
    #[error("the connection broke: {0}")]
    Broken(String),
    /// An answer of a length that none has.
    #[error("the server answered nonsense: {got} bytes where {want} are due")]
    Nonsense {
        /// Bytes it announced.
        got: u64,
        /// Bytes the answer has.
        want: u64,
    },
    /// It spoke without being asked.
    #[error("the server spoke without being asked")]
    Unasked,
    /// It speaks another protocol.
    #[error("the server speaks protocol {theirs}, this build {ours}")]
    Protocol {
        /// Major version of the server.
        theirs: u8,
        /// Major version of this build.
        ours: u8,
    },
    /// It has nothing to lend, or more than can be.
    #[error("the server offers {0} devices, and 1 to 64 can be used")]
    Devices(u32),
    /// This machine has no port, address or thread for the relay.
    #[error("no {what} for the relay: {why}")]
    Relay {
        /// What there is not.
        what: &'static str,
        /// The system's reason.
        why: String,
    },
    /// Another connection to the server has failed, which says why.
    #[error("another connection to the server failed")]
    Elsewhere,
}

impl RpcFailure {
    pub fn broken(error: &io::Error) -> Self {
        Self::Broken(error.to_string())
    }

    pub fn relay(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |why| Self::Relay { what, why: why.to_string() }
    }
}
