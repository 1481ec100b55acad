//! The engine's threads over the fake runner: streams, cancellation, deadlines, draining, lost and panicking workers.
#![allow(clippy::unwrap_used)]

use std::{
    future::Future,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use eldr::{
    Calibration,
    engine::{Engine, EngineError, EngineParts, EngineWorker, Permits, StreamEvent},
    refit::RefitConfig,
    route::{LeastLoaded, LocalityBand, LocalityBandParams, Reason},
    schedule::{DispatchLimits, FakeModel, FakeRunner, Fault, PrefixConfig, SubmitParams},
    types::{FinishReason, MoeShape, Request, SamplingParams, Token, WorkerId},
};
use ndarray::Array2;

#[path = "support/fake_engine.rs"]
#[expect(dead_code, reason = "the model and its letters are used, in engines made here")]
mod fake_engine;

use fake_engine::{Letters, MODEL};

fn engine_with(faults: &[Vec<Fault>], n_slots: u32, limits: DispatchLimits) -> Engine {
    Engine::start(parts_with(faults, n_slots, limits)).unwrap()
}

fn parts_with(faults: &[Vec<Fault>], n_slots: u32, limits: DispatchLimits) -> EngineParts {
    let permits = Arc::new(Permits::new(2));
    let worker = |name: String, faults: Vec<Fault>| EngineWorker {
        name,
        runner: Box::new(FakeRunner::new(MODEL, n_slots, 256, faults)),
        permits: Some(Arc::clone(&permits)),
    };
    EngineParts {
        prefill: vec![worker("prefill 0".to_owned(), Vec::new())],
        decode: faults.iter().enumerate().map(|(i, f)| worker(format!("decode {i}"), f.clone())).collect(),
        tokenizer: Arc::new(Letters),
        policy: Box::new(LeastLoaded),
        calibration: None,
        limits,
        chunk: 16,
        n_expert: MODEL.n_expert,
        prefix: PrefixConfig { max_tokens: 4096, ..PrefixConfig::default() },
    }
}

fn request(seed: u64, max_tokens: u32) -> Request {
    Request {
        prompt: (0..20).map(|i| 1 + Token::try_from((seed + i) % 90).unwrap()).collect(),
        max_tokens,
        sampling: SamplingParams { seed, ignore_eos: true, ..SamplingParams::default() },
        domain: None,
        deadline: None,
    }
}

fn expected(request: &Request) -> Vec<Token> {
    MODEL.complete(&request.prompt, &request.sampling, request.max_tokens)
}

#[test]
fn many_clients_get_their_own_text() {
    let engine = engine_with(&[vec![], vec![], vec![]], 4, DispatchLimits::default());
    std::thread::scope(|scope| {
        for client in 0..16 {
            let engine = engine.clone();
            scope.spawn(move || {
                for i in 0..20 {
                    let request = request(client * 1000 + i, 30);
                    let want = expected(&request);
                    let completion = engine.submit(request).unwrap().collect().unwrap();
                    assert_eq!(completion.tokens, want);
                    assert_eq!(completion.reason, Some(FinishReason::Length));
                    assert_eq!(completion.usage.completion_tokens, 30);
                    assert!(completion.decision.is_some());
                }
            });
        }
    });
    assert!(engine.drain(Duration::from_secs(60)));
    assert!(matches!(engine.submit(request(0, 1)), Err(EngineError::Draining)));
}

#[test]
fn what_a_prompt_begins_with_is_not_computed_again_and_the_client_hears_it() {
    let engine = engine_with(&[vec![]], 4, DispatchLimits::default());
    let long = Request { prompt: (0..80).map(|i| 1 + i % 40).collect(), ..request(3, 5) };
    let cached = |request: &Request| {
        let completion = engine.submit(request.clone()).unwrap().collect().unwrap();
        assert_eq!(completion.tokens, expected(request));
        completion.usage.cached_tokens
    };
    assert_eq!((cached(&long), cached(&long)), (0, 78));
    let branch = Request { prompt: [&long.prompt[..70], &[7, 7, 7]].concat(), ..long.clone() };
    assert_eq!(cached(&branch), 64, "whole blocks");
    let stats = engine.stats().cache;
    assert_eq!((stats.n_prompt_tokens, stats.n_cached_tokens), (80 + 80 + 73, 78 + 64));
    assert_eq!((stats.n_block_hits, stats.n_block_misses, stats.n_fallbacks), (3 + 2, 3 + 1, 0));
}

// Symptom: `cache_prompt: false` of llama-server's clients, who want a whole prompt's time, was not heard.
#[test]
fn a_fresh_request_computes_its_whole_prompt_and_others_find_it() {
    let engine = engine_with(&[vec![]], 4, DispatchLimits::default());
    let long = Request { prompt: (0..80).map(|i| 1 + i % 40).collect(), ..request(3, 5) };
    let cached = |fresh| {
        let params = SubmitParams { fresh, ..SubmitParams::default() };
        let completion = engine.submit_with(long.clone(), params).unwrap().collect().unwrap();
        assert_eq!(completion.tokens, expected(&long));
        completion.usage.cached_tokens
    };
    assert_eq!([true, false, true, true, false].map(cached), [0, 78, 0, 0, 78]);
}

#[test]
fn a_worker_that_panics_or_fails_costs_no_token() {
    for fault in [Fault::DecodePanic(7), Fault::DecodeFatal(7), Fault::ImportRestored(1), Fault::DecodeRestored(3)] {
        let engine = engine_with(&[vec![fault], vec![]], 4, DispatchLimits::default());
        let requests: Vec<Request> = (0..12).map(|seed| request(seed, 40)).collect();
        let streams: Vec<_> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
        for (request, stream) in requests.iter().zip(streams) {
            assert_eq!(stream.collect().unwrap().tokens, expected(request));
        }
    }
}

#[test]
fn when_no_worker_is_left_every_client_hears_it() {
    let engine = engine_with(&[vec![Fault::DecodePanic(3)]], 2, DispatchLimits::default());
    let streams: Vec<_> = (0..8).map(|seed| engine.submit(request(seed, 100)).unwrap()).collect();
    for stream in streams {
        assert!(stream.collect().unwrap_err().contains("decode worker"));
    }
    let late = engine.submit(request(9, 1));
    assert!(late.is_err() || late.unwrap().collect().is_err() || engine.stats().n_active == 0);
}

#[test]
fn cancelling_one_request_touches_no_other() {
    let engine = engine_with(&[vec![]], 8, DispatchLimits::default());
    let endless = |seed| Request { max_tokens: 230, ..request(seed, 1) };
    let mut cancelled = engine.submit(endless(1)).unwrap();
    let kept = engine.submit(endless(2)).unwrap();
    drop(engine.submit(endless(3)).unwrap());
    while !matches!(cancelled.next(), Some(StreamEvent::Token { .. })) {}
    cancelled.cancel();
    let end = cancelled.by_ref().last().unwrap();
    // The last tokens may have been drawn before the cancellation arrived.
    assert!(matches!(end, StreamEvent::End { reason: FinishReason::Cancelled | FinishReason::Length, .. }));
    assert_eq!(cancelled.next(), None);
    assert_eq!(kept.collect().unwrap().tokens, expected(&endless(2)));
    assert!(engine.drain(Duration::from_secs(60)));
    assert_eq!(engine.stats().workers[0].n_inflight, 0);
}

#[test]
fn a_passed_deadline_ends_the_request() {
    let engine = engine_with(&[vec![]], 2, DispatchLimits::default());
    let request = Request { deadline: Some(Duration::ZERO), max_tokens: 230, ..request(1, 1) };
    assert_eq!(engine.submit(request).unwrap().collect().unwrap().reason, Some(FinishReason::Deadline));
}

#[test]
fn a_full_queue_is_refused_with_its_length() {
    let limits = DispatchLimits { max_queue: 1, max_prefill: 1, max_handoffs: 0, ..DispatchLimits::default() };
    let engine = engine_with(&[vec![]], 1, limits);
    let mut streams = Vec::new();
    let full = (0..1000).find_map(|seed| match engine.submit(request(seed, 200)) {
        Ok(stream) => {
            streams.push(stream);
            None
        }
        Err(error) => Some(error),
    });
    assert_eq!(full.unwrap().to_string(), "the queue is full: 1 requests are waiting; try again later");
    for stream in streams {
        assert_eq!(stream.collect().unwrap().tokens.len(), 200);
    }
}

#[test]
fn shutdown_ends_every_stream() {
    let engine = engine_with(&[vec![], vec![]], 2, DispatchLimits::default());
    let streams: Vec<_> = (0..10).map(|seed| engine.submit(request(seed, 230)).unwrap()).collect();
    engine.shutdown();
    for stream in streams {
        let reason = stream.collect().unwrap().reason;
        assert!(matches!(reason, Some(FinishReason::Cancelled | FinishReason::Length)), "{reason:?}");
    }
}

#[test]
fn requests_that_can_not_run_are_refused_with_a_reason() {
    let engine = engine_with(&[vec![]], 1, DispatchLimits::default());
    let refused = |request: Request| engine.submit(request).err().unwrap().to_string();
    assert!(refused(Request { prompt: vec![], ..request(1, 1) }).contains("prompt is empty"));
    assert!(refused(Request { prompt: vec![1; 257], ..request(1, 1) }).contains("257 tokens and a slot holds 256"));
    assert!(refused(Request { prompt: vec![97], ..request(1, 1) }).contains("token 97"));
    assert!(refused(Request { prompt: vec![-1], ..request(1, 1) }).contains("token -1"));
    assert!(refused(request(1, 0)).contains("max_tokens"));
    let hot = SamplingParams { temperature: f32::NAN, ..SamplingParams::default() };
    assert!(refused(Request { sampling: hot, ..request(1, 1) }).contains("temperature"));
    let whole = engine.submit(Request { prompt: vec![1; 256], ..request(1, 9) }).unwrap().collect().unwrap();
    assert_eq!((whole.tokens.len(), whole.reason), (1, Some(FinishReason::Length)));
}

#[test]
fn workers_that_can_not_exchange_sequences_are_refused() {
    let other = FakeModel { n_vocab: 98, ..MODEL };
    let worker = |name: &str, model, n_ctx| EngineWorker {
        name: name.to_owned(),
        runner: Box::new(FakeRunner::new(model, 2, n_ctx, Vec::new())),
        permits: None,
    };
    let parts = |prefill, decode| EngineParts {
        prefill,
        decode,
        tokenizer: Arc::new(Letters),
        policy: Box::new(LeastLoaded),
        calibration: None,
        limits: DispatchLimits::default(),
        chunk: 16,
        n_expert: 8,
        prefix: PrefixConfig::default(),
    };
    let refused = |parts| Engine::start(parts).err().unwrap().to_string();
    let error = refused(parts(vec![worker("prefill 0", MODEL, 64)], vec![worker("decode 0", other, 64)]));
    assert!(error.contains("prefill 0 and decode 0") && error.contains("model is"), "{error}");
    let error = refused(parts(vec![worker("prefill 0", MODEL, 64)], vec![worker("decode 0", MODEL, 32)]));
    assert!(error.contains("64") && error.contains("32"), "{error}");
    assert!(refused(parts(vec![worker("prefill 0", MODEL, 64)], vec![])).contains("at least one"));
}

/// Wakes by unparking the thread that waits.
struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn the_async_end_delivers_the_same_events() {
    let engine = engine_with(&[vec![]], 2, DispatchLimits::default());
    let mut stream = engine.submit(request(5, 50)).unwrap();
    let mut tokens = Vec::new();
    block_on(async {
        while let Some(event) = stream.next_async().await {
            if let StreamEvent::Token { token, .. } = event {
                tokens.push(token);
            }
        }
    });
    assert_eq!(tokens, expected(&request(5, 50)));
}

#[test]
fn the_engine_is_shared_among_threads() {
    fn shared<T: Send + Sync + Clone>() {}
    fn sent<T: Send>() {}
    shared::<Engine>();
    sent::<eldr::engine::TokenStream>();
}

/// A calibration of the fake model for three workers, whose centroids are three experts of its first layer.
fn calibration() -> Calibration {
    Calibration {
        shape: MoeShape { layers: vec![0, 1, 2], n_layer: 4, n_expert: 8, n_expert_used: 2 },
        fingerprint: "fake".to_owned(),
        idf: Array2::ones((3, 8)),
        layers: vec![0, 1],
        centroids: Array2::from_shape_fn((3, 16), |(k, i)| f32::from(u8::from(i == k))),
        n_requests: 3,
        n_tokens: 60,
        rho: 0.5,
        tau: 0.1,
        cost: 0.0,
        seed: 1,
        load_model: None,
        tau_origin: eldr::calibrate::TauOrigin::Default,
        capacity: None,
        verdict: None,
    }
}

#[test]
fn refits_run_beside_the_requests_and_change_no_text() {
    let calibration = Arc::new(calibration());
    let faults = [vec![], vec![Fault::DecodeFatal(40)], vec![]];
    let centroids = Arc::new(calibration.centroids.clone());
    let parts = EngineParts {
        policy: Box::new(LocalityBand::new(centroids, 3, LocalityBandParams::default()).unwrap()),
        calibration: Some(calibration),
        ..parts_with(&faults, 4, DispatchLimits::default())
    };
    let config = RefitConfig { min_fresh: 24, min_interval: Duration::ZERO, ..RefitConfig::default() };
    let engine = Engine::start_refitting(parts, config).unwrap();
    let refit = || engine.stats().refit.unwrap();
    let mut n_requests = 0;
    // The centroids stand for single experts, so the first cut is better, and the last is for the two workers left.
    while refit().n_swaps < 2 || refit().n_workers > 2 {
        assert!(n_requests < 100_000, "{:?}", refit());
        let requests: Vec<_> = (0..8).map(|i| request(n_requests + i, 12)).collect();
        let streams: Vec<_> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
        for (request, stream) in requests.iter().zip(streams) {
            assert_eq!(stream.collect().unwrap().tokens, expected(request));
        }
        n_requests += 8;
    }
    let reads = refit().reads.unwrap();
    assert!((2.0..=8.0).contains(&reads.distinct) && (1.0..=4.0).contains(&reads.batch), "{reads:?}");
    // Requests of the lost worker are routed again.
    assert!(refit().n_observed >= n_requests);
    assert_eq!(refit().off, None);
    engine.shutdown();
}

#[test]
fn a_calibration_of_other_layers_is_taken_while_requests_run() {
    let calibrations: Vec<_> = [&[0, 1][..], &[2], &[0, 1, 2]]
        .into_iter()
        .map(|layers| {
            let centroids = Array2::from_shape_fn((3, 8 * layers.len()), |(k, i)| f32::from(u8::from(i == k)));
            Arc::new(Calibration { layers: layers.to_vec(), centroids, ..calibration() })
        })
        .collect();
    let centroids = Arc::new(calibrations[0].centroids.clone());
    let engine = Engine::start(EngineParts {
        policy: Box::new(LocalityBand::new(centroids, 3, LocalityBandParams::default()).unwrap()),
        calibration: Some(Arc::clone(&calibrations[0])),
        ..parts_with(&[vec![], vec![], vec![]], 2, DispatchLimits::default())
    })
    .unwrap();
    for round in 0..30 {
        let requests: Vec<_> = (0..12).map(|i| request(round * 12 + i, 12)).collect();
        let streams: Vec<_> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
        let next = Arc::clone(&calibrations[round as usize % 3]);
        engine.set_calibration(next).unwrap();
        for (request, stream) in requests.iter().zip(streams) {
            assert_eq!(stream.collect().unwrap().tokens, expected(request));
        }
    }
    let unknown = Arc::new(Calibration { layers: vec![0, 3], ..calibration() });
    let why = engine.set_calibration(unknown).unwrap_err().to_string();
    assert!(why.contains("the workers count [0, 1, 2], which is fixed when they start"), "{why}");
    engine.shutdown();
}

fn fake_worker(name: &str, n_slots: u32, n_ctx_slot: u32) -> EngineWorker {
    EngineWorker {
        name: name.to_owned(),
        runner: Box::new(FakeRunner::new(MODEL, n_slots, n_ctx_slot, Vec::new())),
        permits: None,
    }
}

#[test]
fn a_drained_worker_gets_nothing_new_and_finishes_what_it_has() {
    let engine = engine_with(&[vec![], vec![]], 2, DispatchLimits::default());
    let serve = |n: u64| {
        let requests: Vec<_> = (0..n).map(|i| request(i, 9)).collect();
        let streams: Vec<_> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
        let mut workers = Vec::new();
        for (request, stream) in requests.iter().zip(streams) {
            let mut tokens = Vec::new();
            for event in stream {
                match event {
                    StreamEvent::Routed { decision, .. } => workers.push(decision.worker),
                    StreamEvent::Token { token, .. } => tokens.push(token),
                    StreamEvent::End { .. } => {}
                    StreamEvent::Failed(why) => panic!("{why}"),
                }
            }
            assert_eq!(tokens, expected(request));
        }
        workers.sort_unstable();
        workers.dedup();
        workers
    };
    let [zero, one, two] = [0, 1, 2].map(WorkerId);
    assert_eq!(serve(8), [zero, one]);
    let held = engine.submit(request(1, 200)).unwrap();
    engine.drain_decode(zero).unwrap();
    assert_eq!(serve(8), [one]);
    assert_eq!(
        engine.drain_decode(one).unwrap_err().to_string(),
        "decode worker 1 is the last one that takes requests: add or resume another before it is drained"
    );
    assert_eq!(engine.add_decode(fake_worker("decode 2", 3, 256)).unwrap(), two);
    engine.drain_decode(one).unwrap();
    assert_eq!(serve(8), [two]);
    engine.resume_decode(zero).unwrap();
    assert_eq!(serve(12), [zero, two]);
    assert_eq!(held.collect().unwrap().tokens, expected(&request(1, 200)));
    let unknown = engine.resume_decode(WorkerId(3)).unwrap_err().to_string();
    assert_eq!(unknown, "there is no decode worker 3: there are 3, counted from 0");
    assert_eq!(engine.stats().lost, [false; 3]);
    let refused = engine.add_decode(fake_worker("decode 3", 3, 128)).unwrap_err().to_string();
    assert!(refused.contains("decode 3 holds 128"), "{refused}");
    assert_eq!(engine.stats().workers.len(), 3);
    engine.shutdown();
    assert!(matches!(engine.add_decode(fake_worker("decode 4", 3, 256)), Err(EngineError::Draining)));
    // Symptom: a stopped engine said that its worker takes requests again.
    assert!(matches!(engine.resume_decode(zero), Err(EngineError::Draining)));
}

/// Symptom: "overflow when adding duration to instant".
#[test]
fn a_drain_may_wait_for_ever() {
    let engine = engine_with(&[vec![]], 2, DispatchLimits::default());
    let stream = engine.submit(request(1, 50)).unwrap();
    assert!(engine.drain(Duration::MAX));
    assert_eq!(stream.collect().unwrap().tokens, expected(&request(1, 50)));
}

#[test]
fn a_lost_worker_is_not_resumed_and_a_new_one_takes_its_place() {
    let engine = engine_with(&[vec![Fault::DecodeFatal(3)]], 4, DispatchLimits::default());
    let lost = engine.submit(request(1, 30)).unwrap().collect();
    assert!(lost.is_err(), "{lost:?}");
    assert_eq!(
        engine.resume_decode(WorkerId(0)).unwrap_err().to_string(),
        "decode worker 0 is lost: it comes back with its device, or add a new one"
    );
    assert_eq!(engine.stats().lost, [true]);
    engine.add_decode(fake_worker("decode 1", 4, 256)).unwrap();
    assert_eq!(engine.submit(request(1, 30)).unwrap().collect().unwrap().tokens, expected(&request(1, 30)));
}

#[test]
fn a_refit_cuts_a_centroid_for_a_worker_that_joins_and_none_for_one_that_is_drained() {
    let calibration = Arc::new(calibration());
    let centroids = Arc::new(calibration.centroids.clone());
    let parts = EngineParts {
        policy: Box::new(LocalityBand::new(centroids, 3, LocalityBandParams::default()).unwrap()),
        calibration: Some(calibration),
        ..parts_with(&[vec![], vec![], vec![]], 4, DispatchLimits::default())
    };
    let config = RefitConfig { min_fresh: 24, min_interval: Duration::ZERO, ..RefitConfig::default() };
    let engine = Engine::start_refitting(parts, config).unwrap();
    engine.drain_decode(WorkerId(1)).unwrap();
    engine.add_decode(fake_worker("decode 3", 8, 256)).unwrap();
    let mut n_requests = 0;
    // Once it has a centroid, requests go to the new worker because of it.
    loop {
        assert!(n_requests < 100_000, "{:?}", engine.stats().refit);
        let requests: Vec<_> = (0..8).map(|i| request(n_requests + i, 4)).collect();
        let streams: Vec<_> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
        let mut by_centroid = false;
        for event in streams.into_iter().flatten() {
            let StreamEvent::Routed { decision, .. } = event else { continue };
            assert_ne!(decision.worker, WorkerId(1));
            by_centroid |= decision.worker == WorkerId(3) && decision.reason == Reason::Band;
        }
        n_requests += 8;
        if by_centroid {
            break;
        }
    }
    let refit = engine.stats().refit.unwrap();
    assert_eq!((refit.n_workers, refit.off), (3, None));
}

#[test]
fn a_refit_needs_a_calibration_for_its_workers() {
    let refuse = |calibration: Option<Calibration>, config| {
        let parts = EngineParts {
            calibration: calibration.map(Arc::new),
            ..parts_with(&[vec![], vec![]], 4, DispatchLimits::default())
        };
        Engine::start_refitting(parts, config).err().unwrap().to_string()
    };
    assert!(refuse(None, RefitConfig::default()).contains("no centroids to refit"));
    assert!(refuse(Some(calibration()), RefitConfig::default()).contains("3 centroids for 2 decode workers"));
    let two = Calibration {
        centroids: Array2::from_shape_fn((2, 16), |(k, i)| f32::from(u8::from(i == k))),
        ..calibration()
    };
    let short = RefitConfig { max_signatures: 1, ..RefitConfig::default() };
    assert!(refuse(Some(two), short).contains("refit keeps 1 signatures"));
}
