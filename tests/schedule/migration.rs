//! Running sequences that move between decode workers.

use super::{restless::Restless, *};

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn requests_that_move_end_once_with_the_undisturbed_text(
        seed in any::<u64>(),
        replays in any::<bool>(),
        slots in prop::collection::vec(1u32..5, 2..4),
        faults in prop::collection::vec((0usize..6, 0u64..30, 0u32..4), 0..5),
        n_requests in 1u64..25,
        cancels in prop::collection::vec(0u64..25, 0..4),
        regroups in prop::collection::vec((0u64..25, any::<usize>(), 1u32..4), 0..6),
        migrate_every in 1u32..5,
    ) {
        let faults = on_every_worker(faults);
        let limits = DispatchLimits { max_queue: 64, migrate_every, ..Default::default() };
        let mut world = World::routed(Box::new(Restless::new(seed)), replays, 1, &slots, &faults, limits);
        let requests = disturb(&mut world, seed, n_requests, &cancels, &regroups);
        check(&world, &requests, &faults);
        let n_most = world.n_decode_steps / u64::from(migrate_every);
        prop_assert!(world.dispatcher.stats().n_migrated <= n_most, "more than one in {} steps", migrate_every);
    }
}

/// Four requests on three workers, after `n_steps` rounds; nothing moves by itself.
fn running(n_steps: usize) -> (World, Vec<Request>) {
    let limits = DispatchLimits { migrate_every: 1_000_000, ..Default::default() };
    let mut world = World::routed(Box::new(Restless::new(1)), false, 1, &[4, 4, 4], &[], limits);
    let mut rng = Rng::new(8);
    let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::default() };
    let long = |request: Request| Request { max_tokens: 20, sampling: sampling.clone(), ..request };
    let requests: Vec<Request> = (0..4).map(|_| long(request(&mut rng))).collect();
    for (id, request) in requests.iter().enumerate() {
        assert!(world.submit(id as u64, request.clone()));
    }
    (0..4 * n_steps).for_each(|pick| world.step(pick));
    (world, requests)
}

/// Lets the dispatcher ask for a move; which request is to go where.
fn ask(world: &mut World) -> (RequestId, WorkerId, WorkerId) {
    let before: Vec<u32> = world.dispatcher.workers().iter().map(|worker| worker.n_inflight).collect();
    while world.commands.is_empty() {
        world.dispatcher.rebalance(Duration::ZERO, &mut world.commands);
    }
    let [Command::Migrate(from, id)] = world.commands[..] else { panic!("{:?}", world.commands) };
    let grown = |(worker, &n): (&eldr::route::WorkerView, &u32)| (worker.n_inflight > n).then_some(worker.id);
    let to = world.dispatcher.workers().iter().zip(&before).find_map(grown).expect("a slot that is kept");
    (id, from, to)
}

fn ends_well(mut world: World, requests: &[Request], n_migrated: u64) {
    world.drain();
    for (id, request) in requests.iter().enumerate() {
        assert_eq!(world.tokens[&RequestId(id as u64)], expected(request, false), "request {id}");
    }
    assert_eq!((world.dispatcher.stats().n_migrated, world.dispatcher.stats().n_retried), (n_migrated, 0));
}

#[test]
fn a_move_takes_one_step_and_no_token() {
    let (mut world, requests) = running(12);
    let (id, from, to) = ask(&mut world);
    world.carry_out();
    let n_before = world.tokens[&id].len();
    world.step(1 + from.index());
    assert_eq!(world.tokens[&id].len(), n_before, "it has left before the step");
    world.step(1 + to.index());
    assert_eq!(world.tokens[&id].len(), n_before + 1);
    ends_well(world, &requests, 1);
}

#[test]
fn nothing_moves_to_a_worker_that_was_drained_meanwhile() {
    let (mut world, requests) = running(12);
    let (id, from, to) = ask(&mut world);
    world.carry_out();
    world.dispatcher.drain_decode(to).unwrap();
    world.step(1 + from.index());
    let held = |world: &World| world.dispatcher.workers()[to.index()].n_inflight;
    let n_held = held(&world);
    while !world.ends.contains_key(&id) {
        (0..4).filter(|&pick| pick != 1 + to.index()).for_each(|pick| world.step(pick));
    }
    assert!(held(&world) <= n_held, "a drained worker got a request");
    ends_well(world, &requests, 0);
}

#[test]
fn one_that_ends_before_it_leaves_gives_its_slot_back() {
    let (mut world, requests) = running(12);
    let (id, from, to) = ask(&mut world);
    let n_held = world.dispatcher.workers()[to.index()].n_inflight;
    // The command is late: the request ends first.
    let late = std::mem::take(&mut world.commands);
    while !world.ends.contains_key(&id) {
        world.step(1 + from.index());
    }
    assert_eq!(world.dispatcher.workers()[to.index()].n_inflight, n_held - 1);
    world.commands = late;
    world.carry_out();
    ends_well(world, &requests, 0);
}
