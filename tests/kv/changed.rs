//! What changes behind the cache's back: slots that somebody else shifts, and the layers that are counted after a restart.

use std::{panic, sync::Arc};

use eldr::{
    engine::DiskTier,
    schedule::{FakeRunner, Handoff, Job, ModelRunner, PrefillWorker, PrefixConfig, Reuse, WorkerEvent},
    types::{Request, RequestId, SamplingParams, Slot},
};

use super::{BLOCK, CHUNK, MODEL, N_CTX, World, cold, tokens};

// Symptom: a slot that was shifted and then cut to what a new prompt had in common with it looked like any other.
#[test]
#[cfg_attr(debug_assertions, ignore = "an idle worker of a debug build stops at what it finds")]
fn what_somebody_else_shifts_is_noticed_and_computed_again() {
    let (a, b) = (tokens(24, 1), tokens(9, 2));
    let mut world = World::new(5, 1000, Reuse::Prefix, vec![]).spilling();
    world.worker.pin(&a[..8]).unwrap();
    assert_eq!(world.cached(&[&a, &b]), [0, 0]);
    let holds_a = |world: &World| (0..5).map(Slot).find(|&slot| world.worker.cache().tokens(slot) == a).unwrap();
    let slot = holds_a(&world);
    world.runner.shift(slot);
    let check = panic::AssertUnwindSafe(|| world.worker.cache().check_against(&world.runner));
    let said = *panic::catch_unwind(check).unwrap_err().downcast::<String>().unwrap();
    assert_eq!(said, format!("slot {slot} should hold 24 tokens: its positions were moved"));
    assert_eq!(world.cached(&[&a]), [8], "the pinned beginning has a slot of its own");
    assert_eq!((world.stats.n_fallbacks, world.stats.n_spilled), (1, 0), "and what was shifted is not stored");
    assert_eq!(world.cached(&[&a]), [22], "once computed again, it is used again");
    // The slot of the pinned beginning, and then one that a prompt is in.
    let home = (0..5).map(Slot).find(|&slot| world.worker.cache().tokens(slot) == a[..8]).unwrap();
    world.runner.shift(home);
    world.runner.shift(holds_a(&world));
    assert_eq!(world.cached(&[&a, &a]), [0, 22]);
    assert_eq!((world.worker.cache().n_pinned(), world.stats.n_pinned_tokens), (1, 8), "it is pinned anew");
    world.submit(0, &b.repeat(3));
    world.step();
    (0..5).for_each(|slot| world.runner.shift(Slot(slot)));
    assert_eq!((world.drain().len(), world.n_given_back), (0, 1), "its next chunk does not fit");
}

#[test]
fn after_a_restart_with_another_mask_stored_rows_are_cut_to_it_or_left_where_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let prompt = tokens(22, 1);
    let run = |layers: &[u32]| {
        let mut runner = FakeRunner::new(MODEL, 4, N_CTX, vec![]).tapping(layers);
        let config = PrefixConfig { max_tokens: 1000, block: BLOCK, ..PrefixConfig::default() };
        let tier = DiskTier::open(dir.path(), vec![("model".to_owned(), "fake".to_owned())], 1 << 20).unwrap();
        let worker = PrefillWorker::new(runner.info(), CHUNK, 3, &[0], MODEL.n_expert);
        let mut worker = worker.caching(config, runner.info(), MODEL.n_expert).spilling(Some(Box::new(tier)));
        let request = Request {
            prompt: prompt.clone(),
            max_tokens: 4,
            sampling: SamplingParams { ignore_eos: true, ..SamplingParams::default() },
            domain: None,
            deadline: None,
        };
        worker.admit(Job::new(RequestId(0), Arc::new(request)));
        let mut events = Vec::new();
        while !worker.is_idle() {
            worker.step(&mut runner, &mut events);
        }
        worker.save(&mut runner);
        let handoff = events
            .into_iter()
            .find_map(|event| if let WorkerEvent::Prefilled(handoff) = event { Some(handoff) } else { None });
        let Handoff { job, counts, .. } = handoff.unwrap();
        let (counts, cold) = (counts.unwrap(), cold(&prompt));
        assert_eq!(counts.layers(), layers);
        assert!(layers.iter().all(|&layer| counts.row(layer) == cold.row(layer)), "counts of layers {layers:?}");
        job.n_cached
    };
    assert_eq!(run(&[0, 2]), 0);
    assert_eq!(run(&[2]), 20, "some of the layers that are known");
    assert_eq!(run(&[0, 1]), 0, "layer 1 is not");
    assert_eq!((run(&[0, 1]), run(&[1])), (20, 20), "until it is computed again");
}
