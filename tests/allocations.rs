//! Placing a request takes no memory from the allocator: not to decide, and once as many have come as are there at most,
//! not to book it either.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use allocation_counter::measure;
use eldr::{
    RoutePolicy,
    rng::Rng,
    route::{PolicyKind, PolicyParams, RouteRequest, WorkerView},
    signature::{ExpertCounts, Signature},
    types::{MoeShape, RequestId, WorkerId},
};
use ndarray::Array2;

const N_WORKERS: usize = 24;
const DIM: usize = 4 * 128;

fn signature(rng: &mut Rng) -> Signature {
    Signature::normalised((0..DIM).map(|_| rng.uniform() as f32).collect()).unwrap()
}

fn shape() -> MoeShape {
    MoeShape { layers: (0..48).collect(), n_layer: 48, n_expert: 128, n_expert_used: 8 }
}

fn build(kind: PolicyKind, rng: &mut Rng) -> Box<dyn RoutePolicy> {
    let flat: Vec<f32> = (0..N_WORKERS).flat_map(|_| signature(rng).as_slice().to_vec()).collect();
    let centroids = Some(Arc::new(Array2::from_shape_vec((N_WORKERS, DIM), flat).unwrap()));
    let domains = vec!["math".to_owned()];
    kind.build(&PolicyParams { centroids, domains, shape: Some(shape()), ..PolicyParams::new(N_WORKERS) }).unwrap()
}

fn counts(rng: &mut Rng) -> ExpertCounts {
    let mut counts = ExpertCounts::for_shape(&shape());
    counts.add_tokens(20);
    for layer in shape().usable() {
        let picks: Vec<u32> = (0..160).map(|_| rng.below(128) as u32).collect();
        counts.add(layer, &picks);
    }
    counts
}

#[test]
fn no_policy_allocates_to_decide_and_none_to_book_once_it_has_been_full() {
    let mut rng = Rng::new(1);
    let workers: Vec<WorkerView> = (0..N_WORKERS as u32)
        .map(|id| WorkerView { id: WorkerId(id), n_slots: 8, n_inflight: id % 7, healthy: id != 3 })
        .collect();
    let (signature, counts) = (signature(&mut rng), counts(&mut rng));
    let request = |id| RouteRequest {
        id: RequestId(id),
        signature: Some(&signature),
        domain: Some("math"),
        counts: Some(&counts),
        n_tokens: 20,
    };
    for kind in PolicyKind::ALL {
        let mut policy = build(kind, &mut rng);
        let place = |policy: &mut Box<dyn RoutePolicy>, ids: std::ops::Range<u64>| {
            for id in ids.clone() {
                let worker = policy.select(&request(id), &workers).unwrap().worker;
                policy.cost(&request(id), &workers);
                policy.placed(&request(id), worker);
                policy.stepped(worker, 1, 0.01);
            }
            for id in ids {
                (0..N_WORKERS as u32).for_each(|worker| policy.left(RequestId(id), WorkerId(worker)));
            }
        };
        let first = measure(|| {
            policy.select(&request(0), &workers).unwrap();
            policy.cost(&request(0), &workers);
        });
        assert_eq!(first.count_total, 0, "{kind} decides");
        place(&mut policy, 0..40);
        let again = measure(|| place(&mut policy, 40..80));
        assert_eq!(again.count_total, 0, "{kind} books");
    }
    // The counter counts.
    assert!(measure(|| drop(std::hint::black_box(vec![1u8; 100]))).count_total > 0);
}
