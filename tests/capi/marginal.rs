//! A router in C under `marginal_cost` decides as the built-in policy does that is told the same.
#![expect(unsafe_code, reason = "the functions are C's")]

use std::{mem::MaybeUninit, ptr, sync::Arc};

use eldr::{
    calibrate::{Calibration, TauOrigin, encode},
    capi::{
        CalibrationHandle, CountsHandle, Decision, ModelShape, RequestFacts, RouterHandle, RouterParams,
        SignatureHandle, Status, eldr_calibration_free, eldr_calibration_of_shape, eldr_calibration_read,
        eldr_calibration_widen, eldr_counts_add, eldr_counts_free, eldr_counts_open, eldr_model_shape_init,
        eldr_route_request_init, eldr_router_book, eldr_router_default_params, eldr_router_free, eldr_router_leave,
        eldr_router_open, eldr_router_place, eldr_router_route, eldr_router_route_request, eldr_router_step,
        eldr_router_unbook, eldr_signature_free, eldr_signature_open,
    },
    rng::Rng,
    route::{self, PolicyKind, PolicyParams, RoutePolicy, RouteRequest, WorkerView},
    signature::{ExpertCounts, Signature},
    types::{MoeShape, RequestId, WorkerId},
};
use ndarray::Array2;

const E: u32 = 12;
const K: u32 = 2;
const N_WORKERS: u32 = 4;
const N_SLOTS: u32 = 6;

/// Layer 0 is dense, the last one does not show in prompts.
fn shape() -> MoeShape {
    MoeShape { layers: vec![1, 2, 3, 4], n_layer: 5, n_expert: E, n_expert_used: K }
}

/// Centroids that look at different thirds of the experts of layers 0 and 2.
fn calibration() -> Calibration {
    let flat = (0..N_WORKERS).flat_map(|worker| {
        let row = (0..2 * E).map(move |at| f32::from(u8::from(at % N_WORKERS == worker)));
        Signature::normalised(row.collect()).unwrap().as_slice().to_vec()
    });
    Calibration {
        shape: shape(),
        fingerprint: "planted".into(),
        idf: Array2::from_shape_fn((4, E as usize), |(layer, e)| if layer == 3 { 0.0 } else { 0.5 + e as f32 / 8.0 }),
        layers: vec![0, 2],
        centroids: Array2::from_shape_vec((N_WORKERS as usize, 2 * E as usize), flat.collect()).unwrap(),
        n_requests: 40,
        n_tokens: 400,
        rho: 0.5,
        tau: 0.1,
        tau_origin: TauOrigin::Default,
        capacity: None,
        cost: 0.25,
        seed: 0,
        load_model: None,
        verdict: None,
    }
}

fn made<T>(make: impl FnOnce(Option<&mut MaybeUninit<*mut T>>) -> Status) -> *mut T {
    let mut out = MaybeUninit::new(ptr::null_mut());
    assert!(matches!(make(Some(&mut out)), Status::Ok | Status::NoSignature));
    // SAFETY: it was made with a value.
    unsafe { out.assume_init() }
}

/// What a `_default_params` or `_init` function fills.
fn filled<T>(fill: unsafe extern "C" fn(*mut T, usize) -> Status) -> T {
    let mut params = MaybeUninit::<T>::uninit();
    // SAFETY: a place for the whole struct.
    assert_eq!(unsafe { fill(params.as_mut_ptr(), size_of::<T>()) }, Status::Ok);
    // SAFETY: filled above.
    unsafe { params.assume_init() }
}

fn of_shape() -> *mut CalibrationHandle {
    let MoeShape { layers, n_layer, n_expert, n_expert_used } = shape();
    let given = ModelShape {
        layers: layers.as_ptr(),
        n_layers: layers.len(),
        n_layer,
        n_expert,
        n_expert_used,
        ..filled(eldr_model_shape_init)
    };
    // SAFETY: a whole struct whose layers live.
    made(|out| unsafe { eldr_calibration_of_shape(&raw const given, out) })
}

fn widened() -> *mut CalibrationHandle {
    let bytes = encode(&calibration());
    // SAFETY: so many bytes.
    let narrow = made(|out| unsafe { eldr_calibration_read(bytes.as_ptr(), bytes.len(), out) });
    // SAFETY: a place for a handle.
    let wide = made(|out| unsafe { eldr_calibration_widen(narrow, out) });
    assert_eq!(eldr_calibration_free(narrow), Status::Ok);
    wide
}

fn router(policy: &'static std::ffi::CStr, calibration: *const CalibrationHandle) -> *mut RouterHandle {
    let params = RouterParams {
        policy: policy.as_ptr(),
        calibration,
        n_workers: N_WORKERS,
        n_slots: N_SLOTS,
        ..filled(eldr_router_default_params)
    };
    // SAFETY: a whole struct.
    made(|out| unsafe { eldr_router_open(&raw const params, out) })
}

/// A prompt's picks: for each usable layer k ids a token, near its domain.
struct Prompt {
    n_tokens: u32,
    picks: Vec<Vec<i32>>,
}

impl Prompt {
    fn draw(rng: &mut Rng) -> Self {
        let (n_tokens, domain) = (1 + rng.below(30) as u32, rng.below(4) as u32);
        let layer = |_| {
            let token = |_| {
                let first = (domain * 3 + rng.below(5) as u32) % E;
                [first.cast_signed(), ((first + 1) % E).cast_signed()]
            };
            (0..n_tokens).flat_map(token).collect()
        };
        Self { n_tokens, picks: (0..3).map(layer).collect() }
    }

    fn counts(&self) -> ExpertCounts {
        let mut counts = ExpertCounts::for_shape(&shape());
        counts.add_tokens(self.n_tokens);
        for (layer, picks) in (0..).zip(&self.picks) {
            counts.add(layer, &picks.iter().map(|id| id.cast_unsigned()).collect::<Vec<_>>());
        }
        counts
    }

    fn counts_in_c(&self, calibration: *const CalibrationHandle) -> (*mut CountsHandle, *mut SignatureHandle) {
        // SAFETY: a place for a handle.
        let counts = made(|out| unsafe { eldr_counts_open(calibration, out) });
        for (layer, picks) in (1..).zip(&self.picks) {
            // SAFETY: k ids for each token.
            let status = unsafe { eldr_counts_add(counts, layer, picks.as_ptr(), self.n_tokens as usize) };
            assert_eq!(status, Status::Ok);
        }
        // SAFETY: a place for a handle.
        (counts, made(|out| unsafe { eldr_signature_open(counts, out) }))
    }
}

/// The built-in policy and the bookings its dispatcher would do.
struct BuiltIn {
    policy: Box<dyn RoutePolicy>,
    calibration: Option<Calibration>,
    workers: Vec<WorkerView>,
}

impl BuiltIn {
    fn new(calibration: Option<Calibration>) -> Self {
        let params = PolicyParams {
            shape: Some(shape()),
            centroids: calibration.as_ref().map(|c| Arc::new(c.centroids.clone())),
            ..PolicyParams::new(N_WORKERS as usize)
        };
        let view = |id| WorkerView { id: WorkerId(id), n_slots: N_SLOTS, n_inflight: 0, healthy: true };
        let workers = (0..N_WORKERS).map(view).collect();
        Self { policy: PolicyKind::MarginalCost.build(&params).unwrap(), calibration, workers }
    }

    fn route(&mut self, id: u64, prompt: &Prompt) -> Option<route::Decision> {
        let counts = prompt.counts();
        let signature = self.calibration.as_ref().and_then(|calibration| calibration.signature(&counts));
        let request = RouteRequest {
            id: RequestId(id),
            signature: signature.as_ref(),
            domain: None,
            counts: Some(&counts),
            n_tokens: prompt.n_tokens,
        };
        let decision = self.policy.select(&request, &self.workers).ok()?;
        self.policy.placed(&request, decision.worker);
        self.workers[decision.worker.index()].n_inflight += 1;
        Some(decision)
    }

    fn leave(&mut self, id: u64, worker: WorkerId) {
        self.workers[worker.index()].n_inflight -= 1;
        self.policy.left(RequestId(id), worker);
    }
}

fn assert_same(c: &Decision, rust: &route::Decision) {
    let marginal = rust.marginal.unwrap();
    assert_eq!((c.worker, c.band, c.n_inflight), (rust.worker.0, rust.band, rust.n_inflight));
    let similarity = rust.similarity.map(f32::to_bits);
    assert_eq!((!c.similarity.is_nan()).then(|| c.similarity.to_bits()), similarity);
    assert_eq!(
        (c.experts.to_bits(), c.added_experts.to_bits()),
        (marginal.experts.to_bits(), marginal.added_experts.to_bits())
    );
    assert_eq!(
        [c.step_time, c.cost, c.regret].map(f64::to_bits),
        [marginal.step, marginal.cost, marginal.regret].map(f64::to_bits)
    );
}

fn same_decisions(handle: *mut CalibrationHandle, calibration: Option<Calibration>) {
    let (router, mut built_in) = (router(c"marginal_cost", handle), BuiltIn::new(calibration));
    let mut rng = Rng::new(7);
    let mut running: Vec<(u64, WorkerId)> = Vec::new();
    let mut n_full = 0;
    for id in 0..400 {
        let prompt = Prompt::draw(&mut rng);
        let (counts, signature) = prompt.counts_in_c(handle);
        let request = RequestFacts { id, signature, counts, ..filled(eldr_route_request_init) };
        let mut out = MaybeUninit::<Decision>::zeroed();
        // SAFETY: `size` is the first field.
        unsafe { out.as_mut_ptr().cast::<usize>().write(size_of::<Decision>()) };
        // SAFETY: whole structs.
        let status = unsafe { eldr_router_route_request(router, &raw const request, true, out.as_mut_ptr()) };
        if let Some(decision) = built_in.route(id, &prompt) {
            assert_eq!(status, Status::Ok);
            // SAFETY: filled, since the status is ok.
            assert_same(unsafe { out.assume_init_ref() }, &decision);
            running.push((id, decision.worker));
            // SAFETY: a whole struct.
            let again = unsafe { eldr_router_place(router, 0, &raw const request) };
            assert_eq!(again, Status::Argument, "it is placed");
        } else {
            assert_eq!(status, Status::Full);
            n_full += 1;
        }
        assert_eq!((eldr_counts_free(counts), eldr_signature_free(signature)), (Status::Ok, Status::Ok));
        for worker in 0..N_WORKERS {
            let n_batch = running.iter().filter(|(_, on)| on.0 == worker).count() as u32;
            if n_batch > 0 && rng.below(3) == 0 {
                let time = 1.0 + f64::from(n_batch) * rng.uniform();
                assert_eq!(eldr_router_step(router, worker, n_batch, time), Status::Ok);
                built_in.policy.stepped(WorkerId(worker), n_batch, time);
            }
        }
        while running.len() > 1 && rng.below(20) < running.len() {
            let (id, worker) = running.swap_remove(rng.below(running.len()));
            assert_eq!(eldr_router_leave(router, id), Status::Ok);
            assert_eq!(eldr_router_leave(router, id), Status::Argument, "it has left");
            built_in.leave(id, worker);
        }
    }
    assert!(n_full < 100, "{n_full} of 400 found every worker full");
    assert_eq!((eldr_router_free(router), eldr_calibration_free(handle)), (Status::Ok, Status::Ok));
}

#[test]
fn marginal_cost_without_a_calibration_decides_as_the_built_in_policy() {
    same_decisions(of_shape(), None);
}

#[test]
fn marginal_cost_with_centroids_decides_as_the_built_in_policy() {
    same_decisions(widened(), Some(calibration()));
}

#[test]
fn requests_that_must_be_known_are_not_only_counted() {
    let calibration = of_shape();
    let router = router(c"auto", calibration);
    assert_eq!(eldr_router_book(router, 0), Status::Argument);
    assert_eq!(eldr_router_unbook(router, 0), Status::Argument);
    let mut out = MaybeUninit::<Decision>::zeroed();
    // SAFETY: `size` is the first field.
    unsafe { out.as_mut_ptr().cast::<usize>().write(size_of::<Decision>()) };
    // SAFETY: a struct whose size is set.
    let mut route = |book| unsafe { eldr_router_route(router, ptr::null(), ptr::null(), book, out.as_mut_ptr()) };
    assert_eq!((route(true), route(false)), (Status::Argument, Status::Ok));
    for time in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert_eq!(eldr_router_step(router, 0, 1, time), Status::Argument, "{time}");
    }
    assert_eq!(eldr_router_step(router, N_WORKERS, 1, 1.0), Status::Argument);
    let prompt = Prompt::draw(&mut Rng::new(1));
    let (counts, signature) = prompt.counts_in_c(widened());
    let request = RequestFacts { counts, ..filled(eldr_route_request_init) };
    assert!(!signature.is_null());
    for id in 0..u64::from(N_SLOTS) {
        let request = RequestFacts { id, ..request };
        // SAFETY: a whole struct.
        assert_eq!(unsafe { eldr_router_place(router, 1, &raw const request) }, Status::Ok, "the same layers count");
    }
    let request = RequestFacts { id: 99, ..request };
    // SAFETY: a whole struct.
    assert_eq!(unsafe { eldr_router_place(router, 1, &raw const request) }, Status::Full);
    let other = RequestFacts { signature, ..request };
    // SAFETY: a whole struct.
    assert_eq!(unsafe { eldr_router_place(router, 0, &raw const other) }, Status::Mismatch, "another mask");
    // SAFETY: a whole struct.
    assert_eq!(unsafe { eldr_router_place(router, N_WORKERS, &raw const request) }, Status::Argument);
}
