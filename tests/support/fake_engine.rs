// An engine of fake workers whose every token is known: for tests, and for the examples in the docs.

use std::sync::Arc;

use eldr::{
    engine::{Engine, EngineParts, EngineWorker, Tokenizer},
    route::LeastLoaded,
    schedule::{DispatchLimits, FakeModel, FakeRunner, PrefixConfig},
    types::Token,
};

/// Its next token is a hash of all before it.
pub const MODEL: FakeModel = FakeModel { n_vocab: 97, n_layer: 3, n_expert: 8, n_expert_used: 2 };

/// One token a byte.
pub struct Letters;

impl Tokenizer for Letters {
    fn tokenize(&self, text: &str) -> Result<Vec<Token>, String> {
        Ok(text.bytes().map(|byte| Token::from(byte % 97)).collect())
    }

    fn piece(&self, token: Token) -> Vec<u8> {
        vec![b' ' + u8::try_from(token % 90).unwrap_or(0)]
    }

    fn end_tokens(&self) -> &[Token] {
        &[0]
    }

    fn n_tokens(&self) -> u32 {
        MODEL.n_vocab
    }
}

/// A worker of four slots.
pub fn worker(name: &str) -> EngineWorker {
    let runner = Box::new(FakeRunner::new(MODEL, 4, 4096, Vec::new()));
    EngineWorker { name: name.to_owned(), runner, permits: None }
}

/// One prefill and two decode workers.
pub fn engine() -> Engine {
    let parts = EngineParts {
        prefill: vec![worker("prefill 0")],
        decode: vec![worker("decode 0"), worker("decode 1")],
        tokenizer: Arc::new(Letters),
        policy: Box::new(LeastLoaded),
        calibration: None,
        limits: DispatchLimits::default(),
        chunk: 16,
        n_expert: MODEL.n_expert,
        prefix: PrefixConfig::default(),
    };
    Engine::start(parts).expect("workers that fit each other")
}
