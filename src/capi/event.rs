use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    ffi::{CStr, c_char},
};

use parking_lot::Mutex;

use super::{args::Growing, failure};
use crate::{
    engine::StreamEvent,
    route,
    types::{FinishReason, Token},
};

/// Where a request goes, and why. Set `size` to sizeof(eldr_decision) before it is filled.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Decision {
    /// sizeof(eldr_decision).
    pub size: usize,
    /// The chosen worker.
    pub worker: u32,
    /// Eligible workers the policy chose between at the end: the band's size.
    pub band: u32,
    /// Requests the chosen worker held before this one.
    pub n_inflight: u32,
    /// Cosine of the signature and the chosen worker's centroid; NaN where the policy does not compare them.
    pub similarity: f32,
    /// The largest such cosine over eligible workers; NaN as above.
    pub best_similarity: f32,
    /// What decided, such as `band`, `no_signature` or `load`. Lives for ever.
    pub reason: *const c_char,
    /// Distinct experts that a step of the worker reads without the request, summed over the layers; NaN, like all that
    /// follows, where the policy does not predict it.
    pub experts: f32,
    /// Distinct experts that the request adds.
    pub added_experts: f32,
    /// Time of a step with the request, in the unit of the steps that the policy was told of.
    pub step_time: f64,
    /// Time that all sequences of the batch, the new one included, wait longer for each token.
    pub cost: f64,
    /// What was added to the cost for being less similar to the worker's centroid than to the best one.
    pub regret: f64,
}

impl Growing for Decision {
    const NAME: &'static str = "eldr_decision";
    const FIRST_SIZE: usize = 40;

    fn defaults() -> Self {
        Self {
            size: size_of::<Self>(),
            worker: 0,
            band: 0,
            n_inflight: 0,
            similarity: f32::NAN,
            best_similarity: f32::NAN,
            reason: c"".as_ptr(),
            experts: f32::NAN,
            added_experts: f32::NAN,
            step_time: f64::NAN,
            cost: f64::NAN,
            regret: f64::NAN,
        }
    }
}

impl Decision {
    pub(super) fn of(decision: &route::Decision) -> Self {
        let marginal = decision.marginal.as_ref();
        let reason = serde_json::to_value(decision.reason).ok();
        let reason = reason.as_ref().and_then(|reason| reason.as_str()).unwrap_or("unknown");
        Self {
            worker: decision.worker.0,
            band: decision.band,
            n_inflight: decision.n_inflight,
            similarity: decision.similarity.unwrap_or(f32::NAN),
            best_similarity: decision.best_similarity.unwrap_or(f32::NAN),
            reason: forever(reason).as_ptr(),
            experts: marginal.map_or(f32::NAN, |m| m.experts),
            added_experts: marginal.map_or(f32::NAN, |m| m.added_experts),
            step_time: marginal.map_or(f64::NAN, |m| m.step),
            cost: marginal.map_or(f64::NAN, |m| m.cost),
            regret: marginal.map_or(f64::NAN, |m| m.regret),
            size: size_of::<Self>(),
        }
    }
}

/// What an eldr_event tells.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// A token was drawn: `token`, and in `text` the characters it completes.
    Token = 0,
    /// The decode worker was chosen: `decision`.
    Routed = 1,
    /// The request ended: `finish`, what it used, and in `text` what was left of a character. Nothing follows.
    End = 2,
    /// The request could not be run: `text` says why. Nothing follows.
    Failed = 3,
}

/// Why a request ended.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// It has not.
    None = 0,
    /// The model ended its text.
    Stop = 1,
    /// max_tokens or the slot's length was reached.
    Length = 2,
    /// It was cancelled.
    Cancelled = 3,
    /// Its deadline passed.
    Deadline = 4,
}

/// A token and how likely it was.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: i32,
    /// Natural logarithm of its probability, by the model's own distribution: before bias, grammar, penalties, truncation
    /// and temperature.
    pub logprob: f32,
}

/// What happened to a request. Set `size` to sizeof(eldr_event) before it is filled.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Event {
    /// sizeof(eldr_event).
    pub size: usize,
    /// What happened; the fields that are not of its kind are 0, and `text` is never NULL.
    pub kind: EventKind,
    /// The token.
    pub token: i32,
    /// Text in UTF-8, only whole characters, NUL behind it. eldr owns it; it stays until the thread's next call that
    /// gives out text, and for the call of a callback.
    pub text: *const c_char,
    /// Its bytes without that NUL.
    pub n_text: usize,
    /// When it happened, in nanoseconds since the engine's start; for tokens and decisions.
    pub at_ns: u64,
    /// Why the request ended.
    pub finish: Finish,
    /// Tokens of the prompt.
    pub n_prompt: u32,
    /// Tokens generated.
    pub n_generated: u32,
    /// Tokens of the prompt that were not computed, because a worker still held their keys and values.
    pub n_cached: u32,
    /// The decision; NULL in events of other kinds. eldr's: it stays as long as `text`.
    pub decision: *const Decision,
    /// How likely the drawn token was, as eldr_token_logprob has it; NaN unless the request asked for it.
    pub logprob: f32,
    /// How many `top` has.
    pub n_top: u32,
    /// The likeliest tokens, likeliest first; NULL if there are none. eldr's: it stays as long as `text`.
    pub top: *const TokenLogprob,
}

impl Growing for Event {
    const NAME: &'static str = "eldr_event";
    const FIRST_SIZE: usize = 80;

    fn defaults() -> Self {
        Self {
            size: size_of::<Self>(),
            kind: EventKind::Token,
            token: 0,
            text: c"".as_ptr(),
            n_text: 0,
            at_ns: 0,
            finish: Finish::None,
            n_prompt: 0,
            n_generated: 0,
            n_cached: 0,
            decision: std::ptr::null(),
            logprob: f32::NAN,
            n_top: 0,
            top: std::ptr::null(),
        }
    }
}

impl Event {
    /// The event in C; its text is lent to the calling thread.
    pub(super) fn of(event: &StreamEvent) -> Self {
        let text = |text: &str, event: Self| Self { text: failure::lend(text), n_text: text.len(), ..event };
        let nanos = |at: std::time::Duration| u64::try_from(at.as_nanos()).unwrap_or(u64::MAX);
        match event {
            StreamEvent::Token { token, text: t, at, logprobs } => {
                let event = Self { kind: EventKind::Token, token: *token, at_ns: nanos(*at), ..Self::defaults() };
                let Some(logprobs) = logprobs else { return text(t, event) };
                let (n_top, top) = (logprobs.top.len() as u32, lend_top(&logprobs.top));
                text(t, Self { logprob: logprobs.logprob, n_top, top, ..event })
            }
            StreamEvent::Routed { decision, at } => Self {
                kind: EventKind::Routed,
                at_ns: nanos(*at),
                decision: lend_decision(Decision::of(decision)),
                ..Self::defaults()
            },
            StreamEvent::End { reason, usage, text: t } => {
                let finish = match reason {
                    FinishReason::Stop => Finish::Stop,
                    FinishReason::Length => Finish::Length,
                    FinishReason::Cancelled => Finish::Cancelled,
                    FinishReason::Deadline => Finish::Deadline,
                };
                let (n_prompt, n_generated) = (usage.prompt_tokens, usage.completion_tokens);
                let n_cached = usage.cached_tokens;
                text(t, Self { kind: EventKind::End, finish, n_prompt, n_generated, n_cached, ..Self::defaults() })
            }
            StreamEvent::Failed(why) => text(why, Self { kind: EventKind::Failed, ..Self::defaults() }),
        }
    }
}

thread_local! {
    static DECISION: Cell<Decision> = Cell::new(Decision::defaults());
    static TOP: RefCell<Vec<TokenLogprob>> = const { RefCell::new(Vec::new()) };
}

/// Keeps a decision for the calling thread until its next; where it lies.
fn lend_decision(decision: Decision) -> *const Decision {
    DECISION.with(|kept| {
        kept.set(decision);
        kept.as_ptr().cast_const()
    })
}

/// Keeps the likeliest tokens for the calling thread until its next; where they lie.
fn lend_top(top: &[(Token, f32)]) -> *const TokenLogprob {
    TOP.with_borrow_mut(|kept| {
        kept.clear();
        kept.extend(top.iter().map(|&(token, logprob)| TokenLogprob { token, logprob }));
        if kept.is_empty() { std::ptr::null() } else { kept.as_ptr() }
    })
}

/// `text` as a C string that is never freed: for names, of which there are few.
pub(super) fn forever(text: &str) -> &'static CStr {
    static KNOWN: Mutex<BTreeMap<String, &'static CStr>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock();
    if let Some(text) = known.get(text) {
        return text;
    }
    let kept: &'static CStr = Box::leak(failure::c_string(text.to_owned()).into_boxed_c_str());
    known.insert(text.to_owned(), kept);
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        route::Reason,
        types::{Usage, WorkerId},
    };

    #[test]
    fn a_decision_says_its_reason_by_its_name() {
        let decision = route::Decision {
            worker: WorkerId(3),
            reason: Reason::NoSignature,
            similarity: None,
            best_similarity: Some(0.5),
            band: 2,
            n_inflight: 1,
            marginal: None,
        };
        let c = Decision::of(&decision);
        assert_eq!((c.worker, c.band, c.n_inflight), (3, 2, 1));
        assert!(c.similarity.is_nan() && c.best_similarity.to_bits() == 0.5f32.to_bits());
        assert_eq!(c.reason, forever("no_signature").as_ptr());
        assert_eq!(forever("no_signature"), c"no_signature");
    }

    #[test]
    fn text_with_a_nul_keeps_its_length() {
        let event = StreamEvent::End { reason: FinishReason::Stop, usage: Usage::default(), text: "a\0b".to_owned() };
        let event = Event::of(&event);
        assert_eq!((event.n_text, event.finish), (3, Finish::Stop));
        // SAFETY: the text and its NUL stay until the thread's next text.
        let bytes = unsafe { std::slice::from_raw_parts(event.text.cast::<u8>(), 4) };
        assert_eq!(bytes, b"a\0b\0");
    }
}
