//! A remote device that may fail: a relay of ours stands between ggml's RPC client and the server, and owns the deadline.
//!
//! Never lets the failure of a server reach ggml. Its client has no error path: a connection that closes, an answer of the
//! wrong length and a refused connection each end the process (`RPC_STATUS_ASSERT` in ggml-rpc.cpp), and a server that
//! hangs blocks the calling thread for ever. But the protocol is strictly one command after another, and the length of
//! every answer follows from its command; so once a server has failed, the relay swallows the commands that want no
//! answer and gives the others one of the right length, without contents. The client goes on to compute nonsense,
//! quickly, and whoever called it asks [`Session::failure`], which is set before the first made-up byte, and throws the
//! result away. What ggml keeps of an endpoint (its device, buffer types and allocation sizes) it keeps for ever, so a
//! server that comes back gets a new session with a relay at another port.

mod failure;
mod pump;
mod session;
mod upstream;
mod wire;

pub(super) use failure::RpcFailure;
pub(super) use session::Session;
