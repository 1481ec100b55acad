//! The HTTP server: OpenAI's endpoints, llama-server's, and what shows how requests are routed.
//!
//! Never waits for a worker to say how it is doing, and never runs a model itself: it submits to an [`Engine`].
//!
//! ```
//! # mod fake {
//! #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_engine.rs"));
//! # }
//!
//! use eldr::server::{Ended, ModelCard, Server, ServerConfig, ServerError};
//!
//! # fn main() -> Result<(), ServerError> {
//! let card = ModelCard { id: "toy".to_owned(), ..ModelCard::default() };
//! let config = ServerConfig { listen: "127.0.0.1:0".parse().expect("an address"), ..ServerConfig::default() };
//! let server = Server::new(fake::engine(), card, config)?;
//! let router = server.router(); // for an axum program of your own, or
//! # drop(router);
//! # if false {
//! match server.run(|address| println!("http://{address}/v1"))? {
//!     Ended::Drained => println!("every request was answered"),
//!     Ended::CutShort => println!("not every request was done in time"),
//!     Ended::AtOnce => println!("stopped twice, so at once"),
//! }
//! # }
//! # Ok(())
//! # }
//! ```

mod app;
mod ask;
mod auth;
mod body;
mod chat;
mod choice;
mod completions;
mod config;
mod control;
mod error;
mod experts;
mod fields;
mod harmony;
mod journal;
mod ledger;
mod listen;
mod messages;
mod metrics;
mod output;
mod page;
mod reasoning;
mod refused;
mod respond;
mod samplers;
mod schema;
mod shape;
mod signals;
mod special;
mod template;
mod tokens;
mod tools;

use std::{io, net::SocketAddr, path::PathBuf, sync::Arc};

use axum::{
    Router,
    extract::DefaultBodyLimit,
    middleware,
    routing::{get, post},
};
use tokio::{net::TcpListener, runtime};

use crate::engine::Engine;

pub use config::{ModelCard, ServerConfig};
use signals::Signals;

/// Threads that answer, and those for work that takes long: tokenising, rendering templates.
const N_THREADS: usize = 2;
const N_BLOCKING: usize = 8;

/// Why the server did not start, or could not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The model's chat template can not be read.
    #[error("the model's chat template can not be used: {0}; give another one")]
    Template(String),
    /// The address is taken, or not this machine's.
    #[error("cannot listen on {0}: {1}")]
    Listen(SocketAddr, io::Error),
    /// The request log can not be written.
    #[error("cannot write the request log {}: {}", .0.display(), .1)]
    RequestLog(PathBuf, io::Error),
    /// No thread could be started.
    #[error("cannot start the server's threads: {0}")]
    Threads(io::Error),
}

/// How a server ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// After it had answered what was running.
    Drained,
    /// At the limit, past which requests that were still running ended with an error.
    CutShort,
    /// At the second signal; requests may still be running.
    AtOnce,
}

/// Answers HTTP requests with an engine. Cheap to clone.
#[derive(Clone)]
pub struct Server {
    app: Arc<app::App>,
}

/// What reads files again: a sentence about what has changed, or why nothing has.
type Reload = Arc<dyn Fn() -> Result<String, String> + Send + Sync>;

impl Server {
    /// A server that does not listen yet.
    pub fn new(engine: Engine, card: ModelCard, config: ServerConfig) -> Result<Self, ServerError> {
        Ok(Self { app: Arc::new(app::App::new(engine, card, config)?) })
    }

    /// Calls `reload` at every SIGHUP and `POST /v1/eldr/reload`, on a thread that may block. Without one neither does
    /// anything; of several the first counts.
    #[must_use]
    pub fn on_reload(self, reload: impl Fn() -> Result<String, String> + Send + Sync + 'static) -> Self {
        self.app.reload.get_or_init(|| Arc::new(reload));
        self
    }

    /// Its paths, for a program that has an HTTP server of its own.
    pub fn router(&self) -> Router {
        Router::new()
            .route("/", get(page::page))
            .route("/health", get(control::health))
            .route("/ready", get(control::ready))
            .route("/metrics", get(control::metrics))
            .route("/props", get(control::props))
            .route("/slots", get(control::slots))
            .route("/models", get(control::models))
            .route("/v1/models", get(control::models))
            .route("/v1/eldr/workers", get(control::workers))
            .route("/v1/eldr/workers/{id}/drain", post(control::drain))
            .route("/v1/eldr/workers/{id}/resume", post(control::resume))
            .route("/v1/eldr/experts", get(experts::experts))
            .route("/v1/eldr/reload", post(control::reload))
            .route("/v1/eldr/explain", get(control::explain).post(tokens::explain))
            .route("/tokenize", post(tokens::tokenize))
            .route("/detokenize", post(tokens::detokenize))
            .route("/completions", post(completions::completions))
            .route("/v1/completions", post(completions::completions))
            .route("/chat/completions", post(chat::chat))
            .route("/v1/chat/completions", post(chat::chat))
            .fallback(control::unknown_path)
            .method_not_allowed_fallback(control::wrong_method)
            .layer(middleware::from_fn_with_state(Arc::clone(&self.app), auth::check))
            .layer(DefaultBodyLimit::max(self.app.config.max_body))
            .with_state(Arc::clone(&self.app))
    }

    /// Answers on `listener` until `stop` resolves; then takes no more requests and ends when those it has are done, or
    /// at the limit, past which they end with an error. Says which.
    pub async fn serve(&self, listener: TcpListener, stop: impl Future<Output = ()>) -> Ended {
        listen::serve(&self.app, self.router(), listener, stop).await
    }

    /// Listens as configured and answers until SIGTERM or SIGINT; calls `listening` with the address first.
    pub fn run(&self, listening: impl FnOnce(SocketAddr)) -> Result<Ended, ServerError> {
        let mut builder = runtime::Builder::new_multi_thread();
        builder.worker_threads(N_THREADS).max_blocking_threads(N_BLOCKING).thread_name("eldr-http").enable_all();
        let runtime = builder.build().map_err(ServerError::Threads)?;
        let ended = runtime.block_on(async {
            let address = self.app.config.listen;
            let failed = |error| ServerError::Listen(address, error);
            let listener = TcpListener::bind(address).await.map_err(failed)?;
            let mut signals = Signals::new().map_err(ServerError::Threads)?;
            signals::reload_on_hangup(self.app.reload.get().cloned()).map_err(ServerError::Threads)?;
            listening(listener.local_addr().map_err(failed)?);
            let (first, mut again) = tokio::sync::oneshot::channel::<()>();
            let second = async move {
                signals.stop().await;
                drop(first);
                signals.stop().await;
            };
            let stop = async move {
                // Its sender is only ever dropped.
                let _ = (&mut again).await;
            };
            Ok(tokio::select! {
                ended = self.serve(listener, stop) => ended,
                () = second => Ended::AtOnce,
            })
        });
        runtime.shutdown_background();
        ended
    }
}
