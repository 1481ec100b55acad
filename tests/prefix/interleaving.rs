//! Any interleaving of what can happen to a prefill worker over llama.cpp, on planted models.

use std::{collections::VecDeque, path::Path, sync::Arc};

use eldr::{
    llama::{ContextParams, Model},
    schedule::{Handoff, RunError},
    types::{FinishReason, RequestId, Slot, Token},
};
use proptest::prelude::*;

use super::{
    CHUNK, N_SLOTS, Rig, decode, load, same,
    support::planted::{self, Arch, Planted},
    tiers,
};

#[derive(Debug, Clone)]
enum Op {
    /// A prompt that follows a branching tree of texts, without its last tokens.
    Submit(Vec<u64>, usize),
    Cancel(u64),
    Steps(usize),
    /// What the oldest hand-off leaves on a decode worker comes back.
    Return,
    /// The next chunk fails, and leaves everything as it was.
    Fail,
    /// Somebody else moves a slot's positions.
    Shift(u32, i32),
    /// The worker is lost, by a chunk that fails or from outside; another one takes its place.
    Lose(bool),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        40 => (prop::collection::vec(0u64..2, 1..4), 0usize..50).prop_map(|(path, cut)| Op::Submit(path, cut)),
        10 => (0u64..40).prop_map(Op::Cancel),
        30 => (1usize..4).prop_map(Op::Steps),
        2 => Just(Op::Return),
        2 => Just(Op::Fail),
        3 => (0..N_SLOTS, -5..-1).prop_map(|(slot, by)| Op::Shift(slot, by)),
        1 => prop::bool::ANY.prop_map(Op::Lose),
    ]
}

/// What the worker of a run is made with.
#[derive(Debug, Clone, Copy)]
struct Setting {
    arch: Arch,
    max_tokens: u64,
    ram: u64,
    with_disk: bool,
    /// Answers come back, which is not exact.
    returns: bool,
}

fn setting() -> impl Strategy<Value = Setting> {
    let arch = prop::sample::select([&Arch::MOE[..], &[Arch::HYBRID]].concat());
    let sizes = (prop_oneof![100u64..500, Just(1 << 20)], prop_oneof![Just(0u64), Just(8 << 20)]);
    (arch, sizes, prop::bool::ANY, prop::bool::ANY).prop_map(|(arch, (max_tokens, ram), with_disk, returns)| Setting {
        arch,
        max_tokens,
        ram,
        with_disk,
        returns,
    })
}

fn worker(model: &Model, setting: Setting, exact: bool, dir: &Path) -> Rig {
    let Setting { max_tokens, ram, with_disk, .. } = setting;
    let rig = Rig::aligned(model, ContextParams::default(), max_tokens, if exact { CHUNK } else { 1 });
    let disk = with_disk.then(|| dir.join("prefixes"));
    if ram > 0 || with_disk { rig.storing(tiers(ram, disk.as_deref(), 2 << 20)) } else { rig }
}

fn text(path: &[u64], cut: usize) -> Vec<Token> {
    let parts = path.iter().enumerate().map(|(i, &b)| planted::some_tokens(60 + 7 * b as usize, 10 * i as u64 + b));
    let mut text = parts.collect::<Vec<_>>().concat();
    text.truncate(text.len() - cut);
    text
}

/// Runs the operations; the hand-offs, each compared with a cold prefill.
fn run(ops: &[Op], setting: Setting, seed: u64) -> usize {
    let dir = tempfile::tempdir().unwrap();
    let planted = planted::write(setting.arch, &dir.path().join("model.gguf"), seed);
    let model = load(&planted.path);
    let exact = !setting.arch.has_window() && !setting.returns;
    let mut cold = Rig::new(&model, ContextParams::default(), 0);
    let mut warm = worker(&model, setting, exact, dir.path());
    let (mut to_return, mut n_handed, mut n_submitted) = (VecDeque::new(), 0, 0);
    for (id, op) in (0..).zip(ops.iter().chain([&Op::Steps(usize::MAX)])) {
        match op {
            Op::Submit(path, cut) => {
                n_submitted += 1;
                warm.submit(id, &text(path, *cut));
            }
            Op::Cancel(back) => {
                warm.worker.cancel(RequestId(u64::saturating_sub(id, *back)), FinishReason::Cancelled);
            }
            Op::Steps(n) => {
                for _ in 0..*n {
                    if let Some(handoff) = warm.step() {
                        check(&handoff, &planted, exact, &mut cold, &warm);
                        n_handed += 1;
                        to_return.push_back(handoff);
                        to_return.truncate(2);
                    }
                    if warm.worker.is_idle() {
                        break;
                    }
                }
            }
            Op::Return if setting.returns => {
                if let Some(mut handoff) = to_return.pop_front() {
                    Arc::get_mut(&mut handoff.job.request).unwrap().max_tokens = 40;
                    warm.worker.take_in(decode(&model, handoff));
                }
            }
            Op::Return => {}
            Op::Fail => warm.runner.fail = Some(RunError::Restored("failed as scripted".to_owned())),
            // An idle worker of a debug build stops at what it finds.
            Op::Shift(..) if cfg!(debug_assertions) => {}
            Op::Shift(slot, by) => warm.shift(Slot(*slot), *by),
            Op::Lose(true) => warm.runner.fail = Some(RunError::Fatal("broken as scripted".to_owned())),
            Op::Lose(false) => {
                let mut events = Vec::new();
                warm.worker.abandon("as scripted", &mut events);
                // All but the loss itself are requests.
                warm.n_ended += events.len() - 1;
                warm.lost = true;
            }
        }
        if warm.lost {
            let (said, n_ended) = (std::mem::take(&mut warm.said), warm.n_ended);
            drop(warm);
            warm = Rig { said, n_ended, ..worker(&model, setting, exact, dir.path()) };
        }
    }
    assert_eq!(n_handed + warm.n_ended, n_submitted, "requests that ended");
    n_handed
}

fn check(handoff: &Handoff, planted: &Planted, exact: bool, cold: &mut Rig, warm: &Rig) {
    let (id, prompt) = (handoff.job.id, &handoff.job.request.prompt);
    cold.submit(id.0, prompt);
    let want = cold.drain().remove(0);
    same(handoff, &want, exact, cold);
    if exact {
        assert_eq!(warm.said[&id], cold.said[&id], "logits after {} tokens", prompt.len());
    }
    for layer in planted.shape.usable() {
        assert_eq!(handoff.counts.as_ref().unwrap().row(layer).unwrap(), planted.expected_counts(prompt, layer));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 40, ..ProptestConfig::with_cases(8) })]
    #[test]
    fn any_interleaving_on_planted_models_is_a_cold_prefill(
        ops in prop::collection::vec(op(), 30..60),
        setting in setting(),
        seed in 0u64..1000,
    ) {
        run(&ops, setting, seed);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 40, ..ProptestConfig::with_cases(1) })]
    #[test]
    fn so_are_thousands_of_operations(
        ops in prop::collection::vec(op(), 1000..1200),
        mut setting in setting(),
        seed in 0u64..1000,
    ) {
        for arch in [Arch::Qwen3Moe, Arch::HYBRID] {
            setting.arch = arch;
            prop_assert!(run(&ops, setting, seed) > 200);
        }
    }
}
