use std::{
    ffi::{c_char, c_void},
    mem::MaybeUninit,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;

use super::{
    EngineHandle, EventCallback, RequestHandle, Status,
    args::{self, FromC, Growing},
    callback::{Caller, Listener},
    engine::OpenEngine,
    failure::{Failure, guard_done},
    handles,
    request::{Events, OpenRequest, Routed},
    stopping::Stopping,
};
use crate::{
    schedule::Priority,
    types::{Request, SamplingParams},
};

/// What is added to a token's logit.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitBias {
    /// The token.
    pub token: i32,
    /// What is added.
    pub bias: f32,
}

/// A request. Fill it with eldr_request_default_params() first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RequestParams {
    /// sizeof(eldr_request_params).
    pub size: usize,
    /// The prompt's tokens, special ones included; read before eldr_engine_submit() returns.
    pub prompt: *const i32,
    /// How many they are; at least 1.
    pub n_prompt: usize,
    /// Tokens to generate at most; at least 1.
    pub max_tokens: u32,
    /// 0 takes the likeliest token.
    pub temperature: f32,
    /// Keep the so many likeliest tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of likeliest tokens whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Divide the logits of the last `penalty_last_n` tokens by this; 1 is off.
    pub penalty_repeat: f32,
    /// Lower a token's logit by this for each time it occurred; 0 is off.
    pub penalty_freq: f32,
    /// Lower a token's logit by this when it occurred; 0 is off.
    pub penalty_present: f32,
    /// Generated tokens the penalties look back at.
    pub penalty_last_n: u32,
    /// Not 0: go on after a token that ends the text.
    pub ignore_eos: u32,
    /// Seed of the draws.
    pub seed: u64,
    /// Longest time from here to the last token in milliseconds; 0 is none.
    pub deadline_ms: u64,
    /// A label for the `domain` policy; may be NULL.
    pub domain: *const c_char,
    /// A grammar (GBNF, start symbol `root`) that the text must match; may be NULL.
    pub grammar: *const c_char,
    /// Added to the logits of tokens, each at most once; minus infinity forbids one. Read before eldr_engine_submit()
    /// returns.
    pub logit_bias: *const LogitBias,
    /// How many they are.
    pub n_logit_bias: usize,
    /// Tell how likely each drawn token was, and so many of the likeliest; below 0 tell nothing.
    pub n_logprobs: i32,
    /// Not 0: go before normal requests in the queue, but for every fourth turn.
    pub is_urgent: u32,
    /// Gets the request's events; NULL to ask for them by eldr_request_next().
    pub on_event: EventCallback,
    /// Passed to `on_event`; must stay until the request is freed.
    pub user: *mut c_void,
    /// Texts of which the first to occur ends the request as ELDR_FINISH_STOP; neither it nor what is behind it is told.
    /// What may be the start of one is held back, so a token's text may come with a later event. Read before
    /// eldr_engine_submit() returns.
    pub stop: *const *const c_char,
    /// How many they are.
    pub n_stop: usize,
}

// SAFETY: repr(C); numbers, and pointers that may be NULL.
unsafe impl FromC for RequestParams {}

impl Growing for RequestParams {
    const NAME: &'static str = "eldr_request_params";
    const FIRST_SIZE: usize = 136;

    fn defaults() -> Self {
        let sampling = SamplingParams::default();
        Self {
            size: size_of::<Self>(),
            prompt: std::ptr::null(),
            n_prompt: 0,
            max_tokens: 128,
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            penalty_repeat: sampling.penalty_repeat,
            penalty_freq: sampling.penalty_freq,
            penalty_present: sampling.penalty_present,
            penalty_last_n: sampling.penalty_last_n,
            ignore_eos: u32::from(sampling.ignore_eos),
            seed: sampling.seed,
            deadline_ms: 0,
            domain: std::ptr::null(),
            grammar: std::ptr::null(),
            logit_bias: std::ptr::null(),
            n_logit_bias: 0,
            n_logprobs: -1,
            is_urgent: 0,
            on_event: None,
            user: std::ptr::null_mut(),
            stop: std::ptr::null(),
            n_stop: 0,
        }
    }
}

impl RequestParams {
    /// # Safety
    /// `stop` has `n_stop` terminated strings.
    unsafe fn stops(&self) -> Result<Vec<String>, Failure> {
        // SAFETY: the caller says that they are there.
        let stops = unsafe { args::values(self.stop, self.n_stop, "stop") }?;
        let read = |(at, &stop): (usize, &*const c_char)| {
            let name = format!("stop[{at}]");
            // SAFETY: the caller says that each is a string; a NULL is refused.
            let text = unsafe { args::text(stop, &name) }?;
            if text.is_empty() {
                return Err(Failure::new(
                    Status::Argument,
                    format!("`{name}` is empty, which would end every text; leave it out"),
                ));
            }
            Ok(text.to_owned())
        };
        stops.iter().enumerate().map(read).collect()
    }

    fn sampling(&self) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            penalty_repeat: self.penalty_repeat,
            penalty_freq: self.penalty_freq,
            penalty_present: self.penalty_present,
            penalty_last_n: self.penalty_last_n,
            seed: self.seed,
            ignore_eos: self.ignore_eos != 0,
            n_logprobs: u32::try_from(self.n_logprobs).ok(),
            ..SamplingParams::default()
        }
    }
}

/// Fills `params`, of `size` bytes (sizeof(eldr_request_params)), with the defaults: greedy, 128 tokens. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_request_default_params(params: *mut RequestParams, size: usize) -> Status {
    // SAFETY: the caller passes a struct of `size` bytes.
    guard_done(|| unsafe { args::write_defaults(params, size, "params") })
}

/// Submits a request and opens it in `out`, which the caller frees; before that or after the engine is freed. Any thread.
///
/// With a callback, its first call may come before this returns.
/// Errors: ELDR_STATUS_REQUEST if it can not be run as it stands, ELDR_STATUS_QUEUE_FULL, ELDR_STATUS_DRAINING.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_engine_submit(
    engine: *mut EngineHandle,
    params: *const RequestParams,
    out: Option<&mut MaybeUninit<*mut RequestHandle>>,
) -> Status {
    guard_done(|| {
        let out = args::need(out, "out")?;
        let engine = handles::get::<OpenEngine>(engine)?;
        // SAFETY: the caller passes a struct whose size it set.
        let params = unsafe { args::read(params, "params") }?;
        // SAFETY: the caller passes `n_prompt` tokens.
        let prompt = unsafe { args::values(params.prompt, params.n_prompt, "prompt") }?.to_vec();
        // SAFETY: the caller passes a string or NULL.
        let domain = unsafe { args::optional_text(params.domain, "domain") }?.map(str::to_owned);
        let deadline = (params.deadline_ms > 0).then(|| Duration::from_millis(params.deadline_ms));
        // SAFETY: as above.
        let grammar = unsafe { args::optional_text(params.grammar, "grammar") }?.map(Arc::from);
        // SAFETY: the caller passes `n_logit_bias` of them.
        let bias = unsafe { args::values(params.logit_bias, params.n_logit_bias, "logit_bias") }?;
        let logit_bias = bias.iter().map(|bias| (bias.token, bias.bias)).collect();
        let sampling = SamplingParams { logit_bias, grammar, ..params.sampling() };
        // SAFETY: the caller passes `n_stop` strings.
        let stops = unsafe { params.stops() }?;
        let priority = if params.is_urgent == 0 { Priority::Normal } else { Priority::High };
        let request = Request { prompt, max_tokens: params.max_tokens, sampling, domain, deadline };
        let stream = engine.0.submit_as(request, priority)?;
        let (id, canceller) = (stream.id().0, stream.canceller());
        let stream = Stopping::new(stream, stops);
        let Some(callback) = params.on_event else {
            let events = Events::Asked(Mutex::new(stream));
            out.write(handles::insert(OpenRequest { id, canceller, events, routed: Arc::default() }));
            return Ok(());
        };
        // The callback is told the handle, so the handle comes first.
        let (events, routed) = (Events::Called(Mutex::new(None)), Arc::<Routed>::default());
        let handle = handles::insert(OpenRequest { id, canceller, events, routed: Arc::clone(&routed) });
        out.write(handle);
        let request: Arc<OpenRequest> = handles::get(handle)?;
        let Events::Called(caller) = &request.events else { unreachable!("it was made with a callback") };
        // Held while the thread starts: a callback that frees its request at once waits here for what it must stop.
        let mut caller = caller.lock();
        match Caller::start(stream, routed, Listener { callback, user: params.user }, handle.addr()) {
            Ok(started) => *caller = Some(started),
            Err(error) => {
                handles::remove::<OpenRequest>(handle)?;
                let why = format!("no thread could be started for the request's callback: {error}");
                return Err(Failure::new(Status::Run, why));
            }
        }
        Ok(())
    })
}
