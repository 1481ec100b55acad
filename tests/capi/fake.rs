//! The engine's functions over fake workers, whose every token is known.
#![expect(unsafe_code, reason = "the functions are C's")]

use std::{
    ffi::{CStr, CString, c_char, c_void},
    mem::MaybeUninit,
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
};

use eldr::{
    Engine,
    capi::{
        EngineHandle, Event, EventKind, Finish, RequestHandle, RequestParams, Status, eldr_engine_drain,
        eldr_engine_free, eldr_engine_stats_json, eldr_engine_tokenize, eldr_last_error, eldr_request_cancel,
        eldr_request_free, eldr_request_get_id, eldr_request_next, export_engine,
    },
    engine::{EngineParts, EngineWorker, Tokenizer},
    route::LeastLoaded,
    schedule::{DecodeItem, DispatchLimits, FakeRunner, ModelRunner, PrefixConfig, RunError, RunnerLayer, StepPicks},
    types::{SamplingParams, Token},
};

use super::world::{
    PROMPT, empty_event, engine,
    fake_engine::{Letters, MODEL, worker},
    params, submit,
};

fn next(request: *mut RequestHandle, timeout_ms: i64) -> Result<Event, Status> {
    let mut event = empty_event();
    // SAFETY: a struct whose size is set.
    match unsafe { eldr_request_next(request, timeout_ms, &raw mut event) } {
        Status::Ok => Ok(event),
        status => Err(status),
    }
}

fn text(event: &Event) -> String {
    // SAFETY: the text of the thread's last event.
    unsafe { CStr::from_ptr(event.text) }.to_str().unwrap().to_owned()
}

fn expected(max_tokens: u32) -> Vec<Token> {
    MODEL.complete(&PROMPT, &SamplingParams { ignore_eos: true, ..SamplingParams::default() }, max_tokens)
}

#[test]
fn tokens_text_decision_and_end_arrive_in_order() {
    let engine = export_engine(engine());
    let request = submit(engine, &params(50)).unwrap();
    let (mut tokens, mut routed) = (Vec::new(), 0);
    let end = loop {
        let event = next(request, -1).unwrap();
        match event.kind {
            EventKind::Token => {
                assert_eq!(text(&event).as_bytes(), Letters.piece(event.token));
                tokens.push(event.token);
            }
            EventKind::Routed => {
                routed += 1;
                // SAFETY: it stays until the thread's next event.
                let decision = unsafe { &*event.decision };
                assert_eq!((decision.worker, decision.band), (0, 2));
                assert!(decision.similarity.is_nan() && decision.cost.is_nan());
            }
            EventKind::End => break event,
            EventKind::Failed => panic!("{}", text(&event)),
        }
    };
    assert_eq!((tokens, routed), (expected(50), 1));
    assert_eq!((end.finish, end.n_prompt, end.n_generated), (Finish::Length, 4, 50));
    assert_eq!(next(request, 0).unwrap_err(), Status::End);
    let mut id = MaybeUninit::uninit();
    // SAFETY: a place for a number.
    assert_eq!(unsafe { eldr_request_get_id(request, Some(&mut id)) }, Status::Ok);
    // SAFETY: written above.
    assert_eq!(unsafe { id.assume_init() }, 0);
    assert_eq!(eldr_engine_free(engine), Status::Ok);
    assert_eq!(eldr_request_free(request), Status::Ok);
    assert_eq!(eldr_request_free(request), Status::Handle);
}

/// A fake worker whose decode steps wait until the sender is dropped.
struct Held(FakeRunner, Receiver<()>);

impl RunnerLayer for Held {
    fn inner(&self) -> &dyn ModelRunner {
        &self.0
    }

    fn inner_mut(&mut self) -> &mut dyn ModelRunner {
        &mut self.0
    }

    fn decode(&mut self, batch: &[DecodeItem], next: &mut Vec<Token>, picks: &mut StepPicks) -> Result<(), RunError> {
        let _ = self.1.recv();
        self.0.decode(batch, next, picks)
    }
}

/// An engine that decodes nothing until the sender is dropped.
fn held_engine() -> (Engine, Sender<()>) {
    let (hold, held) = channel();
    let runner = Box::new(Held(FakeRunner::new(MODEL, 4, 4096, Vec::new()), held));
    let parts = EngineParts {
        prefill: vec![worker("prefill 0")],
        decode: vec![EngineWorker { name: "decode 0".to_owned(), runner, permits: None }],
        tokenizer: Arc::new(Letters),
        policy: Box::new(LeastLoaded),
        calibration: None,
        limits: DispatchLimits::default(),
        chunk: 16,
        n_expert: MODEL.n_expert,
        prefix: PrefixConfig::default(),
    };
    (Engine::start(parts).unwrap(), hold)
}

#[test]
fn a_cancelled_request_ends_while_another_thread_waits_for_it() {
    let (held, hold) = held_engine();
    let engine = export_engine(held);
    let request = submit(engine, &params(4000)).unwrap();
    let address = request.expose_provenance();
    let waiting = std::thread::spawn(move || {
        let request = ptr::without_provenance_mut(address);
        loop {
            let event = next(request, -1).unwrap();
            if event.kind == EventKind::End {
                return event.finish;
            }
        }
    });
    assert_eq!(eldr_request_cancel(request), Status::Ok);
    // Only now, so that no token is the last before the cancellation.
    drop(hold);
    assert_eq!(waiting.join().unwrap(), Finish::Cancelled);
    assert_eq!(eldr_request_free(request), Status::Ok);
    assert_eq!(eldr_engine_free(engine), Status::Ok);
}

#[test]
fn a_stop_string_ends_the_text_and_no_part_of_it_is_told() {
    let engine = export_engine(engine());
    let whole: String = expected(50).iter().map(|&token| String::from_utf8(Letters.piece(token)).unwrap()).collect();
    let read = |stop: &[*const c_char]| {
        let params = RequestParams { stop: stop.as_ptr(), n_stop: stop.len(), ..params(50) };
        let request = submit(engine, &params)?;
        let mut told = String::new();
        let end = loop {
            let event = next(request, -1).unwrap();
            told += &text(&event);
            if event.kind == EventKind::End {
                break event.finish;
            }
        };
        assert_eq!((next(request, 0).unwrap_err(), eldr_request_free(request)), (Status::End, Status::Ok));
        Ok::<_, Status>((told, end))
    };
    let stop = CString::new(&whole[20..23]).unwrap();
    let want = whole[..whole.find(&whole[20..23]).unwrap()].to_owned();
    assert_eq!(read(&[c"never there".as_ptr(), stop.as_ptr()]), Ok((want, Finish::Stop)));
    // What might have become one is told at the end.
    let held = CString::new(format!("{}#", &whole[40..50])).unwrap();
    assert_eq!(read(&[held.as_ptr()]), Ok((whole, Finish::Length)));
    assert_eq!(read(&[c"".as_ptr()]), Err(Status::Argument));
    assert_eq!(read(&[c"a".as_ptr(), ptr::null()]), Err(Status::Null));
    assert_eq!(read(&[c"\xff".as_ptr()]), Err(Status::Utf8));
    assert_eq!(eldr_engine_free(engine), Status::Ok);
}

/// What a callback has seen, and what it is to do at its third token.
#[derive(Default)]
struct Seen {
    tokens: Mutex<Vec<Token>>,
    n_ends: AtomicU32,
    frees: bool,
}

unsafe extern "C" fn on_event(request: *mut RequestHandle, event: *const Event, user: *mut c_void) -> bool {
    // SAFETY: the event lives for the call.
    let event = unsafe { &*event };
    // SAFETY: the test keeps it until the request is freed.
    let seen = unsafe { &*user.cast::<Seen>() };
    match event.kind {
        EventKind::Token => seen.tokens.lock().unwrap().push(event.token),
        EventKind::End => _ = seen.n_ends.fetch_add(1, Ordering::SeqCst),
        _ => {}
    }
    if seen.frees && seen.tokens.lock().unwrap().len() == 3 {
        assert_eq!(eldr_request_free(request), Status::Ok);
    }
    true
}

fn called(engine: *mut EngineHandle, seen: &'static Seen) -> *mut RequestHandle {
    let user = ptr::from_ref(seen).cast_mut().cast();
    submit(engine, &RequestParams { on_event: Some(on_event), user, ..params(60) }).unwrap()
}

#[test]
fn a_callback_gets_every_event_until_it_frees_its_request() {
    let engine = export_engine(engine());
    let seen: &Seen = Box::leak(Box::default());
    let request = called(engine, seen);
    while seen.n_ends.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    assert_eq!(next(request, 0).unwrap_err(), Status::Argument, "its events go to the callback");
    assert_eq!(eldr_request_free(request), Status::Ok);
    assert_eq!(*seen.tokens.lock().unwrap(), expected(60));

    let seen: &Seen = Box::leak(Box::new(Seen { frees: true, ..Seen::default() }));
    let request = called(engine, seen);
    while seen.tokens.lock().unwrap().len() < 3 {
        std::thread::yield_now();
    }
    while eldr_request_cancel(request) == Status::Ok {
        std::thread::yield_now();
    }
    assert_eq!(eldr_request_free(request), Status::Handle, "the callback has freed it");
    assert_eq!(eldr_engine_drain(engine, 60_000), Status::Ok);
    assert_eq!(*seen.tokens.lock().unwrap(), expected(3), "nothing was called after that");
    assert_eq!(seen.n_ends.load(Ordering::SeqCst), 0);
    assert_eq!(eldr_engine_free(engine), Status::Ok);
}

#[test]
fn refusals_are_statuses_with_a_sentence() {
    let engine = export_engine(engine());
    let refused = |params: RequestParams| submit(engine, &params).unwrap_err();
    assert_eq!(refused(RequestParams { max_tokens: 0, ..params(1) }), Status::Request);
    assert_eq!(refused(RequestParams { prompt: ptr::null(), ..params(1) }), Status::Null);
    assert_eq!(refused(RequestParams { size: 8, ..params(1) }), Status::StructSize);
    // SAFETY: the thread's last error is terminated.
    let error = unsafe { CStr::from_ptr(eldr_last_error()) }.to_str().unwrap();
    assert!(error.contains("eldr_request_params is 8"), "{error}");

    let mut tokens = [0; 8];
    let mut n = MaybeUninit::uninit();
    let text = c"abc";
    // SAFETY: three bytes, and room for eight tokens.
    let status = unsafe { eldr_engine_tokenize(engine, text.as_ptr(), 3, tokens.as_mut_ptr(), 8, Some(&mut n)) };
    // SAFETY: written above.
    assert_eq!((status, unsafe { n.assume_init() }, &tokens[..3]), (Status::Ok, 3, &[0, 1, 2][..]));

    let mut json = MaybeUninit::uninit();
    // SAFETY: a place for a pointer.
    assert_eq!(unsafe { eldr_engine_stats_json(engine, Some(&mut json)) }, Status::Ok);
    // SAFETY: written above.
    let json = unsafe { json.assume_init() };
    // SAFETY: the thread's last text is terminated.
    let json = unsafe { CStr::from_ptr(json) }.to_str().unwrap();
    let stats: serde_json::Value = serde_json::from_str(json).unwrap();
    assert_eq!((&stats["policy"], &stats["workers"][1]["n_slots"]), (&"least_loaded".into(), &4.into()));

    assert_eq!(eldr_engine_drain(engine, 10_000), Status::Ok);
    assert_eq!(refused(params(1)), Status::Draining);
    assert_eq!(eldr_engine_free(engine), Status::Ok);
    assert_eq!(refused(params(1)), Status::Handle);
}

/// One of two callbacks that free each other's requests.
struct Rival {
    other: AtomicUsize,
    is_called: AtomicBool,
    status: Mutex<Option<Status>>,
}

static RIVALS: [Rival; 2] = [Rival::new(), Rival::new()];

impl Rival {
    const fn new() -> Self {
        Self { other: AtomicUsize::new(0), is_called: AtomicBool::new(false), status: Mutex::new(None) }
    }
}

unsafe extern "C" fn frees_the_other(_: *mut RequestHandle, _: *const Event, user: *mut c_void) -> bool {
    let rival = &RIVALS[user.addr()];
    rival.is_called.store(true, Ordering::SeqCst);
    // Both are in their callbacks, and know each other, before either frees.
    while RIVALS.iter().any(|rival| !rival.is_called.load(Ordering::SeqCst) || rival.other.load(Ordering::SeqCst) == 0)
    {
        std::thread::yield_now();
    }
    let status = eldr_request_free(ptr::without_provenance_mut(rival.other.load(Ordering::SeqCst)));
    *rival.status.lock().unwrap() = Some(status);
    true
}

// Symptom: they waited for each other for ever.
#[test]
fn of_two_callbacks_that_free_each_others_requests_one_does_not_wait() {
    let engine = export_engine(engine());
    let requests = [0, 1].map(|user| {
        let user = ptr::without_provenance_mut(user);
        submit(engine, &RequestParams { on_event: Some(frees_the_other), user, ..params(60) }).unwrap()
    });
    for (rival, other) in RIVALS.iter().zip([requests[1], requests[0]]) {
        rival.other.store(other.addr(), Ordering::SeqCst);
    }
    let statuses = RIVALS.each_ref().map(|rival| {
        loop {
            if let Some(status) = *rival.status.lock().unwrap() {
                return status;
            }
            std::thread::yield_now();
        }
    });
    let mut sorted = statuses;
    sorted.sort_by_key(|status| *status as i32);
    assert_eq!(sorted, [Status::Ok, Status::Wait]);
    for request in requests {
        assert_eq!(eldr_request_free(request), Status::Handle);
    }
    assert_eq!(eldr_engine_free(engine), Status::Ok);
}
