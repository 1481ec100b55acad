//! Workers whose device fails and comes back, over the fake runner: no request is lost, every text is whole.
#![allow(clippy::unwrap_used)]

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    thread::sleep,
    time::Duration,
};

use eldr::{
    engine::{Engine, EngineParts, EngineWorker},
    kv::ChunkCounts,
    route::LeastLoaded,
    schedule::{
        DecodeItem, DispatchLimits, FakeRunner, ModelRunner, PrefixConfig, Recovery, RunError, RunnerLayer, StepPicks,
    },
    types::{Request, SamplingParams, Slot, Token},
};

#[path = "support/fake_engine.rs"]
#[expect(dead_code, reason = "the model and its letters are used, in engines made here")]
mod fake_engine;

use fake_engine::{Letters, MODEL};

/// A device that fails when told, or in its n-th step, and is back when told.
#[derive(Default)]
struct Device {
    /// How often it has failed; a runner made before is of no use.
    n_failures: AtomicU32,
    /// Whether it can be used again.
    is_away: AtomicU32,
    /// Steps until it fails by itself; 0 is never.
    n_steps_left: AtomicU32,
}

impl Device {
    fn fail(&self) {
        self.is_away.store(1, SeqCst);
        self.n_failures.fetch_add(1, SeqCst);
    }

    fn runner(self: &Arc<Self>) -> OnDevice {
        OnDevice {
            runner: FakeRunner::new(MODEL, 4, 256, Vec::new()),
            way: Arc::new(Way { device: Arc::clone(self), born: self.n_failures.load(SeqCst) }),
        }
    }

    fn worker(self: &Arc<Self>, name: &str) -> EngineWorker {
        EngineWorker { name: name.to_owned(), runner: Box::new(self.runner()), permits: None }
    }
}

struct Way {
    device: Arc<Device>,
    born: u32,
}

impl Recovery for Way {
    fn failure(&self) -> Option<String> {
        (self.device.n_failures.load(SeqCst) > self.born).then(|| "the device is gone".to_owned())
    }

    fn revive(&self) -> Result<Box<dyn ModelRunner>, String> {
        match self.device.is_away.load(SeqCst) {
            0 => Ok(Box::new(self.device.runner())),
            _ => Err("still away".to_owned()),
        }
    }
}

struct OnDevice {
    runner: FakeRunner,
    way: Arc<Way>,
}

impl OnDevice {
    fn check(&self) -> Result<(), RunError> {
        let left = self.way.device.n_steps_left.load(SeqCst);
        if left > 0 && self.way.device.n_steps_left.fetch_sub(1, SeqCst) == 1 {
            self.way.device.fail();
        }
        self.way.failure().map_or(Ok(()), |reason| Err(RunError::Fatal(reason)))
    }
}

impl RunnerLayer for OnDevice {
    fn inner(&self) -> &dyn ModelRunner {
        &self.runner
    }

    fn inner_mut(&mut self) -> &mut dyn ModelRunner {
        &mut self.runner
    }

    fn recovery(&self) -> Option<Arc<dyn Recovery>> {
        Some(Arc::clone(&self.way) as Arc<dyn Recovery>)
    }

    fn prefill(
        &mut self,
        slot: Slot,
        tokens: &[Token],
        pos: u32,
        last: bool,
        counts: Option<&mut ChunkCounts>,
    ) -> Result<Option<Token>, RunError> {
        let token = self.runner.prefill(slot, tokens, pos, last, counts);
        self.check().and(token)
    }

    fn decode(&mut self, batch: &[DecodeItem], next: &mut Vec<Token>, picks: &mut StepPicks) -> Result<(), RunError> {
        let done = self.runner.decode(batch, next, picks);
        self.check().and(done)
    }
}

fn engine(prefill: &Arc<Device>, decode: &[&Arc<Device>]) -> Engine {
    let workers = decode.iter().enumerate().map(|(index, device)| device.worker(&format!("decode {index}")));
    engine_of(prefill, workers.collect())
}

fn engine_of(prefill: &Arc<Device>, decode: Vec<EngineWorker>) -> Engine {
    let parts = EngineParts {
        prefill: vec![prefill.worker("prefill 0")],
        decode,
        tokenizer: Arc::new(Letters),
        policy: Box::new(LeastLoaded),
        calibration: None,
        limits: DispatchLimits::default(),
        chunk: 16,
        n_expert: MODEL.n_expert,
        prefix: PrefixConfig { max_tokens: 4096, ..PrefixConfig::default() },
    };
    Engine::start(parts).unwrap()
}

fn request(seed: u64) -> Request {
    Request {
        prompt: (0..40).map(|i| 1 + Token::try_from((seed + i) % 90).unwrap()).collect(),
        max_tokens: 60,
        sampling: SamplingParams { seed, ignore_eos: true, ..SamplingParams::default() },
        domain: None,
        deadline: None,
    }
}

fn text(request: &Request) -> Vec<Token> {
    MODEL.complete(&request.prompt, &request.sampling, request.max_tokens)
}

/// Runs twelve requests side by side and holds their texts against the model's; `meanwhile` happens in between.
fn whole_texts(engine: &Engine, meanwhile: impl FnOnce()) {
    let streams: Vec<_> =
        (0..12).map(request).map(|request| (text(&request), engine.submit(request).unwrap())).collect();
    meanwhile();
    for (want, stream) in streams {
        assert_eq!(stream.collect().unwrap().tokens, want);
    }
}

/// Draws nothing after this token, so many times.
struct Mute {
    runner: FakeRunner,
    token: Token,
    n_left: u32,
}

impl RunnerLayer for Mute {
    fn inner(&self) -> &dyn ModelRunner {
        &self.runner
    }

    fn inner_mut(&mut self) -> &mut dyn ModelRunner {
        &mut self.runner
    }

    fn decode(&mut self, batch: &[DecodeItem], next: &mut Vec<Token>, picks: &mut StepPicks) -> Result<(), RunError> {
        self.runner.decode(batch, next, picks)?;
        let mute = batch.iter().filter(|item| item.draws && item.token == self.token).take(self.n_left as usize);
        let undrawn: Vec<_> = mute.map(|item| (item.slot, "nothing to draw".to_owned())).collect();
        self.n_left -= u32::try_from(undrawn.len()).unwrap();
        if undrawn.is_empty() { Ok(()) } else { Err(RunError::Undrawn(undrawn)) }
    }
}

fn mute(token: Token, n_left: u32) -> Engine {
    let runner = Box::new(Mute { runner: FakeRunner::new(MODEL, 4, 256, Vec::new()), token, n_left });
    engine_of(&Arc::default(), vec![EngineWorker { name: "decode 0".to_owned(), runner, permits: None }])
}

// Symptom: a sampler that found no token lost its worker, and, prefilled again, its request lost the next.
#[test]
fn a_sequence_that_draws_nothing_costs_no_other_its_worker() {
    let token = text(&request(3))[10];
    let engine = mute(token, 1);
    whole_texts(&engine, || {});
    assert_eq!((engine.stats().dispatch.n_retried, engine.stats().dispatch.n_workers_lost), (1, 0));

    let engine = mute(token, u32::MAX);
    let streams: Vec<_> =
        (0..12).map(request).map(|request| (text(&request), engine.submit(request).unwrap())).collect();
    for (want, stream) in streams {
        // The last token is drawn and not run.
        let stumbles = want[..want.len() - 1].contains(&token);
        match stream.collect() {
            Ok(done) => assert!(!stumbles && done.tokens == want),
            Err(error) => assert!(stumbles && error.contains("nothing to draw"), "{error}"),
        }
    }
    assert_eq!(engine.stats().dispatch.n_workers_lost, 0);
}

fn await_lost(engine: &Engine, lost: &[bool]) {
    for _ in 0..600 {
        if engine.stats().lost == lost {
            return;
        }
        sleep(Duration::from_millis(50));
    }
    panic!("{:?} are lost, not {lost:?}", engine.stats().lost);
}

#[test]
fn an_idle_worker_is_lost_without_a_request_and_comes_back_as_it_was() {
    let devices: [Arc<Device>; 3] = Default::default();
    let engine = engine(&devices[0], &[&devices[1], &devices[2]]);
    devices[1].fail();
    await_lost(&engine, &[true, false]);
    whole_texts(&engine, || {});
    devices[1].is_away.store(0, SeqCst);
    await_lost(&engine, &[false, false]);
    whole_texts(&engine, || {});
    // The third time around it works like the first.
    devices[1].fail();
    await_lost(&engine, &[true, false]);
    devices[1].is_away.store(0, SeqCst);
    await_lost(&engine, &[false, false]);
    assert_eq!(engine.stats().dispatch.n_workers_lost, 2);
}

#[test]
fn requests_wait_for_the_only_decode_worker() {
    let devices: [Arc<Device>; 2] = Default::default();
    devices[1].n_steps_left.store(25, SeqCst);
    let engine = engine(&devices[0], &[&devices[1]]);
    whole_texts(&engine, || {
        await_lost(&engine, &[true]);
        devices[1].is_away.store(0, SeqCst);
    });
    assert!(engine.stats().n_given_back.worker_lost > 0);
}

#[test]
fn requests_wait_for_the_only_prefill_worker() {
    let devices: [Arc<Device>; 2] = Default::default();
    devices[0].n_steps_left.store(5, SeqCst);
    let engine = engine(&devices[0], &[&devices[1]]);
    whole_texts(&engine, || {
        while devices[0].n_failures.load(SeqCst) == 0 {
            sleep(Duration::from_millis(5));
        }
        devices[0].is_away.store(0, SeqCst);
    });
    assert_eq!(engine.stats().dispatch.n_workers_lost, 1);
}

#[test]
fn an_engine_ends_while_a_device_is_away() {
    let devices: [Arc<Device>; 2] = Default::default();
    let engine = engine(&devices[0], &[&devices[1]]);
    devices[1].fail();
    await_lost(&engine, &[true]);
    engine.shutdown();
}
