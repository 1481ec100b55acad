use std::{collections::BTreeMap, ffi::c_char, mem::MaybeUninit, sync::Arc};

use parking_lot::Mutex;

use super::{
    CalibrationHandle, Decision, RouterHandle, SignatureHandle, Status,
    args::{self, FromC, Growing},
    calibration::{Basis, OpenCalibration, check_same_mask},
    event::forever,
    failure::{Failure, guard, guard_done},
    handles::{self, Class},
    signature::OpenSignature,
};
use crate::{
    route::{AutoFacts, PolicyKind, PolicyParams, RoutePolicy, RouteRequest, WorkerView, choose},
    sim::Verdict,
    types::{RequestId, WorkerId},
};

/// Most workers of a router, and most experts of all of them together, of which `marginal_cost` keeps a number each (1 GiB).
const MAX_WORKERS: usize = 1 << 16;
const MAX_EXPERTS: usize = 1 << 28;

pub(super) struct OpenRouter {
    pub(super) basis: Option<Arc<Basis>>,
    /// The policy goes by which requests a worker holds, not only by how many.
    pub(super) knows_requests: bool,
    pub(super) state: Mutex<State>,
}

pub(super) struct State {
    pub(super) policy: Box<dyn RoutePolicy>,
    pub(super) workers: Vec<WorkerView>,
    /// Where the requests are that were placed by their number.
    pub(super) placed: BTreeMap<RequestId, WorkerId>,
}

impl Class for OpenRouter {
    const NAME: &'static str = "eldr_router";
    type Handle = RouterHandle;
}

impl OpenRouter {
    /// Refuses to count a request that the policy has to know.
    fn check_counting(&self) -> Result<(), Failure> {
        if !self.knows_requests {
            return Ok(());
        }
        let why = "policy marginal_cost has to know which requests a worker holds; place them by eldr_router_place() or \
                   eldr_router_route_request(), and say by eldr_router_leave() when they end";
        Err(Failure::new(Status::Argument, why))
    }
}

impl State {
    pub(super) fn worker(&mut self, id: u32) -> Result<&mut WorkerView, Failure> {
        let n = self.workers.len();
        let missing = || Failure::new(Status::Argument, format!("there is no worker {id}; pass 0 to {}", n - 1));
        self.workers.get_mut(id as usize).ok_or_else(missing)
    }
}

/// How a router is made. Fill it with eldr_router_default_params() first.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RouterParams {
    /// sizeof(eldr_router_params).
    pub size: usize,
    /// The policy's name; NULL is `locality_band`. eldr_policy_names() has them all, and `auto` is `marginal_cost`, or
    /// `least_loaded` where that has nothing to gain.
    pub policy: *const c_char,
    /// For policies that compare signatures, and for `marginal_cost`, which wants one of eldr_calibration_widen() or
    /// eldr_calibration_of_shape(); NULL for the others. Its handle may be freed afterwards.
    pub calibration: *const CalibrationHandle,
    /// Decode workers, numbered from 0; 0 is as many as the calibration has centroids.
    pub n_workers: u32,
    /// Requests each of them can hold, until eldr_router_set_worker() says otherwise.
    pub n_slots: u32,
    /// Width of the locality band, a cosine distance; NaN is the calibration's.
    pub tau: f32,
    /// Fewest workers of the locality band.
    pub min_band: u32,
    /// Seed of the policies that draw.
    pub seed: u64,
    /// The workload's domains separated by commas, for the `domain` policy; may be NULL.
    pub domains: *const c_char,
}

// SAFETY: repr(C); numbers and pointers.
unsafe impl FromC for RouterParams {}

impl Growing for RouterParams {
    const NAME: &'static str = "eldr_router_params";
    const FIRST_SIZE: usize = 56;

    fn defaults() -> Self {
        Self {
            size: size_of::<Self>(),
            policy: std::ptr::null(),
            calibration: std::ptr::null(),
            n_workers: 0,
            n_slots: 16,
            tau: f32::NAN,
            min_band: 1,
            seed: 0,
            domains: std::ptr::null(),
        }
    }
}

/// Fills `params`, of `size` bytes (sizeof(eldr_router_params)), with the defaults. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_router_default_params(params: *mut RouterParams, size: usize) -> Status {
    // SAFETY: the caller passes a struct of `size` bytes.
    guard_done(|| unsafe { args::write_defaults(params, size, "params") })
}

/// Opens a router in `out`, whose workers are all idle; the caller frees it. Any thread.
///
/// Errors: ELDR_STATUS_CONFIG for an unknown policy, one that needs a calibration, and settings that do not fit it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_router_open(
    params: *const RouterParams,
    out: Option<&mut MaybeUninit<*mut RouterHandle>>,
) -> Status {
    guard_done(|| {
        let out = args::need(out, "out")?;
        // SAFETY: the caller passes a struct whose size it set.
        let params = unsafe { args::read(params, "params") }?;
        // SAFETY: the caller passes a string or NULL.
        let policy = unsafe { args::optional_text(params.policy, "policy") }?;
        // SAFETY: as above.
        let domains = unsafe { args::optional_text(params.domains, "domains") }?;
        let basis = handles::get_optional::<OpenCalibration>(params.calibration)?.map(|c| Arc::clone(&c.0));
        let calibration = basis.as_ref().map(|basis| &basis.calibration);
        let mut kind: PolicyKind = policy
            .unwrap_or(PolicyKind::LocalityBand.name())
            .parse()
            .map_err(|error| Failure::new(Status::Config, error))?;
        let n_workers = match (params.n_workers, &calibration) {
            (0, Some(calibration)) => calibration.n_workers(),
            (n, _) => n as usize,
        };
        if n_workers > MAX_WORKERS {
            let why = format!("{n_workers} workers are more than {MAX_WORKERS}; pass how many there are");
            return Err(Failure::new(Status::Config, why));
        }
        let calibrated = calibration.filter(|calibration| calibration.n_workers() > 0);
        if kind == PolicyKind::Auto {
            let helps = calibrated.and_then(Verdict::of).map(|verdict| verdict.helps);
            let (has_experts, is_calibrated) = (basis.is_some(), calibrated.is_some());
            let facts = AutoFacts { has_experts, n_workers, may_overtake: false, is_calibrated, helps };
            kind = choose(&facts).0;
        }
        if kind == PolicyKind::MarginalCost && basis.is_none() {
            let why = "policy marginal_cost has to know the model's experts; give it a calibration, of \
                       eldr_calibration_of_shape() where there is none";
            return Err(Failure::new(Status::Config, why));
        }
        let n_expert = basis.as_ref().map_or(0, |b| b.shape().n_layer_moe() * b.shape().n_expert as usize);
        if kind.uses_counts() && n_workers.saturating_mul(n_expert) > MAX_EXPERTS {
            let why = format!(
                "{n_workers} workers of {n_expert} experts in all layers are more than policy marginal_cost can keep; take \
                 fewer workers a router"
            );
            return Err(Failure::new(Status::Config, why));
        }
        let given = Some(params.tau).filter(|tau| !tau.is_nan());
        let tau = given.or(calibration.map(|c| c.tau));
        let defaults = PolicyParams::new(n_workers);
        let policy = kind.build(&PolicyParams {
            seed: params.seed,
            tau: tau.unwrap_or(defaults.tau),
            min_band: params.min_band,
            centroids: calibrated.map(|c| Arc::new(c.centroids.clone())),
            shape: basis.as_ref().map(|basis| basis.shape().clone()),
            domains: domains.into_iter().flat_map(|list| list.split(',')).map(|name| name.trim().to_owned()).collect(),
            ..defaults
        })?;
        let workers = (0..n_workers as u32)
            .map(|id| WorkerView { id: WorkerId(id), n_slots: params.n_slots, n_inflight: 0, healthy: true })
            .collect();
        let state = Mutex::new(State { policy, workers, placed: BTreeMap::new() });
        out.write(handles::insert(OpenRouter { basis, knows_requests: kind.uses_counts(), state }));
        Ok(())
    })
}

/// Writes the name of the policy that routes, which is never `auto`, to `name`; it lives for ever. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_router_get_policy(
    router: *const RouterHandle,
    name: Option<&mut MaybeUninit<*const c_char>>,
) -> Status {
    guard_done(|| {
        let router = handles::get::<OpenRouter>(router)?;
        let policy = router.state.lock().policy.name();
        args::put(name, forever(policy).as_ptr(), "name")
    })
}

/// Says how many requests worker `worker` can hold, and whether any may be sent to it. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_router_set_worker(
    router: *mut RouterHandle,
    worker: u32,
    n_slots: u32,
    is_running: bool,
) -> Status {
    guard_done(|| {
        let router = handles::get::<OpenRouter>(router)?;
        let mut state = router.state.lock();
        let view = state.worker(worker)?;
        (view.n_slots, view.healthy) = (n_slots, is_running);
        Ok(())
    })
}

/// Says how many requests worker `worker` holds now, whatever was booked or placed. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_router_report(router: *mut RouterHandle, worker: u32, n_inflight: u32) -> Status {
    guard_done(|| {
        let router = handles::get::<OpenRouter>(router)?;
        router.state.lock().worker(worker)?.n_inflight = n_inflight;
        Ok(())
    })
}

/// Takes a place on worker `worker` that no decision booked. Any thread.
///
/// ELDR_STATUS_FULL if it has none. Errors: ELDR_STATUS_ARGUMENT with `marginal_cost`: eldr_router_place().
#[unsafe(no_mangle)]
pub extern "C" fn eldr_router_book(router: *mut RouterHandle, worker: u32) -> Status {
    guard(|| {
        let router = handles::get::<OpenRouter>(router)?;
        router.check_counting()?;
        let mut state = router.state.lock();
        let view = state.worker(worker)?;
        if view.n_inflight >= view.n_slots {
            return Ok(Status::Full);
        }
        view.n_inflight += 1;
        Ok(Status::Ok)
    })
}

/// Gives back a place on worker `worker`: the request ended, or never got there. Any thread.
///
/// Errors: ELDR_STATUS_ARGUMENT if the worker holds nothing, and with `marginal_cost`: eldr_router_leave().
#[unsafe(no_mangle)]
pub extern "C" fn eldr_router_unbook(router: *mut RouterHandle, worker: u32) -> Status {
    guard_done(|| {
        let router = handles::get::<OpenRouter>(router)?;
        router.check_counting()?;
        let mut state = router.state.lock();
        let view = state.worker(worker)?;
        view.n_inflight = view.n_inflight.checked_sub(1).ok_or_else(|| {
            Failure::new(Status::Argument, format!("worker {worker} holds no request; give a place back once"))
        })?;
        Ok(())
    })
}

/// Chooses a worker for a request and fills `out`, whose `size` is set. With `book`, a place on it is taken, in one step
/// with the choice, so that several threads may route at once. Any thread.
///
/// `signature` may be NULL (a request without one goes by load), and so may `domain`, a label for the `domain` policy.
/// ELDR_STATUS_FULL if every running worker is full, ELDR_STATUS_NO_WORKER if none is running.
/// Errors: ELDR_STATUS_MISMATCH for a signature of another calibration, ELDR_STATUS_ARGUMENT for `book` with
/// `marginal_cost`, which has to know the request: eldr_router_route_request().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_router_route(
    router: *mut RouterHandle,
    signature: *const SignatureHandle,
    domain: *const c_char,
    book: bool,
    out: *mut Decision,
) -> Status {
    guard_done(|| {
        let router = handles::get::<OpenRouter>(router)?;
        let signature = handles::get_optional::<OpenSignature>(signature)?;
        // SAFETY: the caller passes a string or NULL.
        let domain = unsafe { args::optional_text(domain, "domain") }?;
        if let (Some(signature), Some(basis)) = (&signature, &router.basis) {
            check_same_mask(basis, &signature.basis, "signature")?;
        }
        if book {
            router.check_counting()?;
        }
        let request =
            RouteRequest { signature: signature.as_ref().map(|s| &s.signature), domain, ..RouteRequest::default() };
        let mut state = router.state.lock();
        let State { policy, workers, .. } = &mut *state;
        let decision = policy.select(&request, workers)?;
        // SAFETY: the caller passes a struct whose size it set.
        unsafe { args::fill(out, &Decision::of(&decision), "out") }?;
        workers[decision.worker.index()].n_inflight += u32::from(book);
        Ok(())
    })
}

/// Frees the handle; NULL is let pass. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_router_free(router: *mut RouterHandle) -> Status {
    guard_done(|| handles::remove::<OpenRouter>(router).map(drop))
}
