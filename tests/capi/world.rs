//! An engine of fake workers, and how a test in Rust calls the C library as C does.
#![expect(unsafe_code, reason = "the functions are C's")]

use std::{mem::MaybeUninit, ptr, sync::Arc};

use eldr::{
    capi::{
        EngineHandle, Event, RequestHandle, RequestParams, Status, eldr_engine_submit, eldr_request_default_params,
    },
    engine::{Engine, EngineParts, EngineWorker, Tokenizer},
    route::LeastLoaded,
    schedule::{DispatchLimits, FakeModel, FakeRunner, PrefixConfig},
    types::Token,
};

pub const MODEL: FakeModel = FakeModel { n_vocab: 97, n_layer: 3, n_expert: 8, n_expert_used: 2 };
pub const PROMPT: [Token; 4] = [5, 6, 7, 8];

/// One token a byte.
pub struct Letters;

impl Tokenizer for Letters {
    fn tokenize(&self, text: &str) -> Result<Vec<Token>, String> {
        Ok(text.bytes().map(|byte| Token::from(byte % 97)).collect())
    }

    fn piece(&self, token: Token) -> Vec<u8> {
        vec![b' ' + u8::try_from(token % 90).unwrap()]
    }

    fn end_tokens(&self) -> &[Token] {
        &[0]
    }

    fn n_tokens(&self) -> u32 {
        MODEL.n_vocab
    }
}

/// One prefill and two decode workers.
pub fn engine() -> Engine {
    let worker = |name: &str| EngineWorker {
        name: name.to_owned(),
        runner: Box::new(FakeRunner::new(MODEL, 4, 4096, Vec::new())),
        permits: None,
    };
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
    Engine::start(parts).unwrap()
}

/// A request of [`PROMPT`] that goes on to its last token.
pub fn params(max_tokens: u32) -> RequestParams {
    let mut params = MaybeUninit::<RequestParams>::uninit();
    // SAFETY: a place for the whole struct.
    let status = unsafe { eldr_request_default_params(params.as_mut_ptr(), size_of::<RequestParams>()) };
    assert_eq!(status, Status::Ok);
    // SAFETY: filled above.
    let params = unsafe { params.assume_init() };
    RequestParams { prompt: PROMPT.as_ptr(), n_prompt: PROMPT.len(), max_tokens, ignore_eos: 1, ..params }
}

/// Submits as C does.
pub fn submit(engine: *mut EngineHandle, params: &RequestParams) -> Result<*mut RequestHandle, Status> {
    let mut out = MaybeUninit::new(ptr::null_mut());
    // SAFETY: a whole struct, whose prompt is a constant.
    match unsafe { eldr_engine_submit(engine, params, Some(&mut out)) } {
        // SAFETY: it was made with a value.
        Status::Ok => Ok(unsafe { out.assume_init() }),
        status => Err(status),
    }
}

/// An event to be filled.
pub fn empty_event() -> Event {
    let mut event = MaybeUninit::<Event>::zeroed();
    // SAFETY: `size` is the first field.
    unsafe { event.as_mut_ptr().cast::<usize>().write(size_of::<Event>()) };
    // SAFETY: zeros are an event.
    unsafe { event.assume_init() }
}
