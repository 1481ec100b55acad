//! Thousands of requests, cancellations, failures, returns, shifts and losses in any order.

use std::{collections::VecDeque, sync::Arc};

use eldr::{
    engine::DiskTier,
    schedule::{Fault, Handoff, PrefixStore, Reuse},
    types::{FinishReason, Slot, Token},
};
use proptest::prelude::*;

use super::{World, tokens};

#[derive(Debug, Clone)]
enum Op {
    /// A prompt that follows a branching tree of texts.
    Submit(Vec<usize>, usize),
    Cancel(usize),
    Step,
    /// The oldest hand-off is decoded, with or without a tap, and comes back.
    Return(bool),
    /// A beginning of the tree of texts is kept for good.
    Pin(Vec<usize>),
    /// Somebody else moves the positions of a slot.
    Shift(u32),
    Lose,
}

fn op() -> impl Strategy<Value = Op> {
    let path = || prop::collection::vec(0usize..2, 1..5);
    prop_oneof![
        60 => (path(), 0usize..8).prop_map(|(path, cut)| Op::Submit(path, cut)),
        20 => (0usize..6).prop_map(Op::Cancel),
        100 => Just(Op::Step),
        10 => prop::bool::ANY.prop_map(Op::Return),
        2 => path().prop_map(Op::Pin),
        2 => (0u32..7).prop_map(Op::Shift),
        1 => Just(Op::Lose),
    ]
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        (0u64..400).prop_map(Fault::ReuseRestored),
        (0u64..400).prop_map(Fault::PrefillRestored),
        (0u64..200).prop_map(Fault::ExportRestored),
        (0u64..200).prop_map(Fault::ImportRestored),
        (0u64..400).prop_map(Fault::PrefillFatal),
    ]
}

/// Neither the first nor the other branches end at a block's end.
fn branch(path: &[usize]) -> Vec<Token> {
    path.iter().enumerate().flat_map(|(i, &b)| tokens(11 + b, 2 * i + b)).collect()
}

#[derive(Debug, Clone, Copy)]
enum Store {
    None,
    Memory,
    Disk,
}

fn run(ops: &[Op], faults: Vec<Fault>, n_slots: u32, max_tokens: u64, reuse: Reuse, store: Store) {
    let dir = tempfile::tempdir().unwrap();
    let with_store = |world: World| match store {
        Store::None => world,
        Store::Memory => world.spilling(),
        Store::Disk => {
            let mut tier = DiskTier::open(dir.path(), vec![("model".to_owned(), "fake".to_owned())], 20_000).unwrap();
            tier.closing();
            world.storing(Box::new(tier))
        }
    };
    let mut world = with_store(World::new(n_slots, max_tokens, reuse, faults));
    let mut handoffs = VecDeque::new();
    for (id, op) in ops.iter().enumerate() {
        match op {
            Op::Submit(path, cut) => {
                let text = branch(path);
                world.submit(id as u64, &text[..text.len() - cut]);
            }
            Op::Cancel(nth) => {
                let id = world.running.keys().copied().nth(*nth);
                if let Some(id) = id {
                    world.worker.cancel(id, FinishReason::Cancelled);
                }
            }
            Op::Step => handoffs.extend(world.step()),
            Op::Return(tap) => {
                let left = handoffs.pop_front().and_then(|mut handoff: Handoff| {
                    Arc::get_mut(&mut handoff.job.request)?.max_tokens = 9;
                    World::decode(handoff, *tap)
                });
                if let Some(left) = left {
                    world.worker.take_in(left);
                }
            }
            Op::Pin(path) => drop(world.worker.pin(&branch(path))),
            // An idle worker of a debug build stops at what it finds.
            Op::Shift(_) if cfg!(debug_assertions) => {}
            Op::Shift(slot) => world.runner.shift(Slot(slot % n_slots)),
            Op::Lose => world.lost = true,
        }
        if world.lost {
            world.lose(max_tokens, reuse);
            world = with_store(world);
        }
        handoffs.truncate(8);
    }
    world.drain();
    if world.lost {
        return;
    }
    let pinned = world.stats.n_pinned_tokens;
    assert!(world.stats.n_held_tokens <= max_tokens.max(1) + pinned, "{:?} for {max_tokens}", world.stats);
}

fn settings() -> impl Strategy<Value = (u32, u64, Reuse, Store)> {
    let reuse = prop_oneof![3 => Just(Reuse::Prefix), 1 => Just(Reuse::Whole), 1 => Just(Reuse::Window)];
    let store = prop_oneof![4 => Just(Store::None), 4 => Just(Store::Memory), 1 => Just(Store::Disk)];
    (3u32..7, prop_oneof![1 => Just(0u64), 3 => 1u64..60, 3 => Just(1000)], reuse, store)
}

proptest! {
    #[test]
    fn any_interleaving_gives_the_counts_and_the_state_of_a_cold_prefill(
        ops in prop::collection::vec(op(), 1..120),
        faults in prop::collection::vec(fault(), 0..4),
        (n_slots, max_tokens, reuse, store) in settings(),
    ) {
        run(&ops, faults, n_slots, max_tokens, reuse, store);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn so_do_thousands_of_operations(
        ops in prop::collection::vec(op(), 3000..5000),
        faults in prop::collection::vec(fault(), 0..40),
        (n_slots, max_tokens, reuse, store) in settings(),
    ) {
        run(&ops, faults, n_slots, max_tokens, reuse, store);
    }
}
