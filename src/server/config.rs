use std::{net::SocketAddr, path::PathBuf, time::Duration};

/// How the server listens, whom it answers and what it refuses.
#[derive(Debug, Clone, PartialEq)]
pub struct ServerConfig {
    /// Where to listen; this machine only, unless told otherwise.
    pub listen: SocketAddr,
    /// Keys of which a request must bring one; empty lets everyone in.
    pub api_keys: Vec<String>,
    /// Bytes of a request's body at most.
    pub max_body: usize,
    /// Connections open at once at most; one more waits to be accepted.
    pub max_connections: usize,
    /// Choices of one request at most: prompts times `n`.
    pub max_choices: usize,
    /// Longest time a request may wait for its first token.
    pub queue_timeout: Option<Duration>,
    /// Longest time from submission to the last token.
    pub request_timeout: Option<Duration>,
    /// Silence in a stream after which a comment says that it is still alive.
    pub keep_alive: Duration,
    /// Time a client has to send a request's head.
    pub header_timeout: Duration,
    /// Time that running requests get to end at a shutdown.
    pub drain_timeout: Duration,
    /// File that gets one JSON line a request; no prompt and no answer is in it unless asked for.
    pub request_log: Option<PathBuf>,
    /// Put prompts and answers into the request log.
    pub log_text: bool,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            api_keys: Vec::new(),
            max_body: 8 << 20,
            max_connections: 1024,
            max_choices: 16,
            queue_timeout: Some(Duration::from_secs(300)),
            request_timeout: None,
            keep_alive: Duration::from_secs(15),
            header_timeout: Duration::from_secs(20),
            drain_timeout: Duration::from_secs(30),
            request_log: None,
            log_text: false,
        }
    }
}

/// What the server says about the model it serves.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelCard {
    /// Its name for clients.
    pub id: String,
    /// Its chat template, in Jinja; none takes `ChatML`.
    pub chat_template: Option<String>,
    /// The text of the token in front of every prompt; empty if there is none.
    pub bos: String,
    /// The text of the token at the end of every text; empty if there is none.
    pub eos: String,
    /// Tokens of context it was trained with.
    pub n_ctx_train: u32,
    /// Parameters.
    pub n_params: u64,
    /// Bytes of the weights.
    pub n_bytes: u64,
}
