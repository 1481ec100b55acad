use std::{
    hash::{BuildHasher as _, RandomState},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use tokio::sync::watch;

use crate::{
    engine::{Engine, Tokenizer},
    rng::mix,
    types::{SamplingParams, Token},
};

use super::{
    Reload, ServerError,
    auth::Keys,
    config::ModelCard,
    config::ServerConfig,
    error::ApiError,
    journal::Journal,
    ledger::Ledger,
    metrics::Metrics,
    special::{Part, Specials},
    template::ChatTemplate,
};

/// What all handlers share.
pub(super) struct App {
    pub engine: Engine,
    pub card: ModelCard,
    pub config: ServerConfig,
    pub template: ChatTemplate,
    pub specials: Specials,
    pub keys: Keys,
    pub ledger: Ledger,
    pub metrics: Metrics,
    pub journal: Option<Journal>,
    /// What a SIGHUP does.
    pub reload: OnceLock<Reload>,
    /// Seconds since 1970.
    pub created: u64,
    /// Bytes of the longest token: what tells that a text can not fit before it is cut into tokens.
    max_piece: usize,
    /// True once what is still running is cut short.
    cut: watch::Sender<bool>,
    /// False from the moment of a shutdown on.
    accepting: AtomicBool,
    seeds: AtomicU64,
}

impl App {
    pub fn new(engine: Engine, card: ModelCard, config: ServerConfig) -> Result<Self, ServerError> {
        let template = ChatTemplate::new(&card)?;
        let journal = config.request_log.as_deref().map(Journal::open).transpose()?;
        let tokenizer = engine.tokenizer();
        let pieces = (0..tokenizer.n_tokens()).filter_map(|token| Token::try_from(token).ok());
        let max_piece = pieces.map(|token| tokenizer.piece(token).len()).max().unwrap_or(0);
        let keys = Keys::new(&config.api_keys);
        Ok(Self {
            template,
            specials: Specials::of(tokenizer.as_ref()),
            keys,
            ledger: Ledger::default(),
            metrics: Metrics::new(),
            journal,
            reload: OnceLock::new(),
            created: now(),
            max_piece,
            cut: watch::Sender::new(false),
            accepting: AtomicBool::new(true),
            // Names and default seeds must differ from one start to the next.
            seeds: AtomicU64::new(RandomState::new().hash_one(0)),
            engine,
            card,
            config,
        })
    }

    pub fn tokenizer(&self) -> &Arc<dyn Tokenizer> {
        self.engine.tokenizer()
    }

    pub fn is_accepting(&self) -> bool {
        self.accepting.load(Ordering::Relaxed)
    }

    pub fn stop_accepting(&self) {
        self.accepting.store(false, Ordering::Relaxed);
    }

    /// Ends what is still running with an error.
    pub fn cut_short(&self) {
        self.cut.send_replace(true);
    }

    /// Tells when that has happened.
    pub fn cuts(&self) -> watch::Receiver<bool> {
        self.cut.subscribe()
    }

    /// A number no other call gives.
    pub fn fresh(&self) -> u64 {
        mix(self.seeds.fetch_add(1, Ordering::Relaxed))
    }

    /// Seconds after which a refused client may try again: a second for every round of the slots that is waiting.
    pub fn retry_after(&self) -> u64 {
        let stats = self.engine.stats();
        let n_slots: u64 = stats.workers.iter().map(|worker| u64::from(worker.n_slots)).sum();
        (1 + stats.n_queued as u64 / n_slots.max(1)).min(60)
    }

    /// The tokens of the text of field `param`, special ones in it included, which must fit a slot. Runs on a thread
    /// that may block.
    pub async fn tokenize(self: &Arc<Self>, text: String, param: &str) -> Result<Vec<Token>, ApiError> {
        self.tokenize_parts(vec![Part { text, parse_special: true }], param).await
    }

    /// The tokens of a prompt in parts, as [`App::tokenize`].
    pub async fn tokenize_parts(self: &Arc<Self>, parts: Vec<Part>, param: &str) -> Result<Vec<Token>, ApiError> {
        let n_ctx_slot = self.engine.n_ctx_slot() as usize;
        let n: usize = parts.iter().map(|part| part.text.len()).sum();
        if n > n_ctx_slot.saturating_mul(self.max_piece) {
            let why = format!("{param} has {n} bytes, more than the {n_ctx_slot} tokens of a slot can hold");
            return Err(ApiError::too_long(param, why));
        }
        let app = Arc::clone(self);
        let tokens = blocking(move || {
            let mut tokens = Vec::new();
            for (at, part) in parts.iter().enumerate() {
                tokens.extend(app.tokenizer().tokenize_as(&part.text, at == 0, part.parse_special)?);
            }
            Ok(tokens)
        });
        tokens.await?.map_err(|why: String| ApiError::invalid(param, why))
    }

    /// Refuses a grammar that can not steer the workers' draws.
    pub async fn check_grammar(self: &Arc<Self>, sampling: &SamplingParams) -> Result<(), ApiError> {
        let Some(grammar) = sampling.grammar.clone() else { return Ok(()) };
        let app = Arc::clone(self);
        let checked = blocking(move || app.tokenizer().check_grammar(&grammar)).await?;
        checked.map_err(|why| ApiError::invalid("grammar", why))
    }

    /// Refuses a prompt of field `param` that the engine would refuse.
    pub fn check_prompt(&self, prompt: &[Token], param: &str) -> Result<(), ApiError> {
        let n_ctx_slot = self.engine.n_ctx_slot() as usize;
        if prompt.is_empty() {
            return Err(ApiError::invalid(param, format!("{param} is empty: give at least one token")));
        }
        if prompt.len() > n_ctx_slot {
            let n = prompt.len();
            let why = format!("{param} has {n} tokens and a slot holds {n_ctx_slot}: shorten it");
            return Err(ApiError::too_long(param, why));
        }
        let n_vocab = self.tokenizer().n_tokens();
        let unknown = |token: &&Token| u32::try_from(**token).map_or(true, |token| token >= n_vocab);
        match prompt.iter().find(unknown) {
            Some(token) => {
                let why = format!("token {token} of {param} is not in the vocabulary of {n_vocab} tokens");
                Err(ApiError::invalid(param, why))
            }
            None => Ok(()),
        }
    }
}

/// Runs `work` where it keeps no other client waiting.
pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| ApiError::failed("the request could not be worked on"))
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
