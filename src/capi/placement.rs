use std::{ffi::c_char, sync::Arc};

use super::{
    CountsHandle, Decision, RouterHandle, SignatureHandle, Status,
    args::{self, FromC, Growing},
    calibration::{check_same, check_same_mask},
    counts::OpenCounts,
    failure::{Failure, guard, guard_done},
    handles,
    router::{OpenRouter, State},
    signature::OpenSignature,
};
use crate::{
    route::RouteRequest,
    signature::ExpertCounts,
    types::{RequestId, WorkerId},
};

/// A request that a router knows by its number. Fill it with eldr_route_request_init() first.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RequestFacts {
    /// sizeof(eldr_route_request).
    pub size: usize,
    /// Its number, unlike those of all others that are placed.
    pub id: u64,
    /// Its signature; NULL if it has none.
    pub signature: *const SignatureHandle,
    /// The picks of its prompt, which `marginal_cost` predicts from; may be NULL. Read before the call returns.
    pub counts: *const CountsHandle,
    /// A label for the `domain` policy; may be NULL.
    pub domain: *const c_char,
    /// Tokens of context it brings; 0 is as many as were counted.
    pub n_tokens: u32,
    /// 0 for now.
    pub reserved: u32,
}

// SAFETY: repr(C); numbers and pointers.
unsafe impl FromC for RequestFacts {}

impl Growing for RequestFacts {
    const NAME: &'static str = "eldr_route_request";
    const FIRST_SIZE: usize = 48;

    fn defaults() -> Self {
        Self {
            size: size_of::<Self>(),
            id: 0,
            signature: std::ptr::null(),
            counts: std::ptr::null(),
            domain: std::ptr::null(),
            n_tokens: 0,
            reserved: 0,
        }
    }
}

/// What the handles of a [`RequestFacts`] stand for.
struct Facts<'a> {
    id: RequestId,
    signature: Option<Arc<OpenSignature>>,
    counts: Option<ExpertCounts>,
    domain: Option<&'a str>,
    n_tokens: u32,
}

impl Facts<'_> {
    /// # Safety
    /// `request` is NULL or points to a struct whose size is set, and `domain` in it is NULL or a string that stays as it is.
    unsafe fn read(router: &OpenRouter, request: *const RequestFacts) -> Result<Self, Failure> {
        // SAFETY: passed on.
        let request = unsafe { args::read(request, "request") }?;
        let signature = handles::get_optional::<OpenSignature>(request.signature)?;
        let counts = handles::get_optional::<OpenCounts>(request.counts)?;
        if let Some(basis) = &router.basis {
            signature.as_ref().map_or(Ok(()), |signature| check_same_mask(basis, &signature.basis, "signature"))?;
            counts.as_ref().map_or(Ok(()), |counts| check_same(basis, &counts.basis, "eldr_counts"))?;
        }
        let counts = counts.map(|counts| counts.whole()).transpose()?;
        // SAFETY: passed on.
        let domain = unsafe { args::optional_text(request.domain, "domain") }?;
        let n_tokens = match request.n_tokens {
            0 => counts.as_ref().map_or(0, ExpertCounts::n_tokens),
            n => n,
        };
        Ok(Self { id: RequestId(request.id), signature, counts, domain, n_tokens })
    }

    fn ask(&self) -> RouteRequest<'_> {
        RouteRequest {
            id: self.id,
            signature: self.signature.as_ref().map(|signature| &signature.signature),
            domain: self.domain,
            counts: self.counts.as_ref(),
            n_tokens: self.n_tokens,
        }
    }
}

impl State {
    fn check_new(&self, id: RequestId) -> Result<(), Failure> {
        let Some(worker) = self.placed.get(&id) else { return Ok(()) };
        let why = format!("request {id} is on worker {worker} already; number requests apart, or say that it left");
        Err(Failure::new(Status::Argument, why))
    }

    fn place(&mut self, request: &RouteRequest<'_>, worker: WorkerId) {
        self.workers[worker.index()].n_inflight += 1;
        self.policy.placed(request, worker);
        self.placed.insert(request.id, worker);
    }
}

/// Fills `request`, of `size` bytes (sizeof(eldr_route_request)), with the defaults: number 0 and nothing known of it. Any
/// thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_route_request_init(request: *mut RequestFacts, size: usize) -> Status {
    // SAFETY: the caller passes a struct of `size` bytes.
    guard_done(|| unsafe { args::write_defaults(request, size, "request") })
}

/// Like eldr_router_route(), for a request that the router is to know by its number. With `place` it is placed on the
/// worker in one step with the choice, until eldr_router_leave(). Any thread.
///
/// ELDR_STATUS_FULL if every running worker is full, ELDR_STATUS_NO_WORKER if none is running.
/// Errors: ELDR_STATUS_ARGUMENT for a number that is placed, ELDR_STATUS_MISMATCH for a signature or counts of another
/// calibration than the router's, ELDR_STATUS_TAP if the layers have counted different tokens.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_router_route_request(
    router: *mut RouterHandle,
    request: *const RequestFacts,
    place: bool,
    out: *mut Decision,
) -> Status {
    guard_done(|| {
        let router = handles::get::<OpenRouter>(router)?;
        // SAFETY: the caller passes a struct whose size it set, and strings or NULL in it.
        let facts = unsafe { Facts::read(&router, request) }?;
        let mut state = router.state.lock();
        if place {
            state.check_new(facts.id)?;
        }
        let State { policy, workers, .. } = &mut *state;
        let decision = policy.select(&facts.ask(), workers)?;
        // SAFETY: the caller passes a struct whose size it set.
        unsafe { args::fill(out, &Decision::of(&decision), "out") }?;
        if place {
            state.place(&facts.ask(), decision.worker);
        }
        Ok(())
    })
}

/// Places a request on worker `worker`, which no decision chose. Any thread.
///
/// ELDR_STATUS_FULL if it has no place. Errors: as eldr_router_route_request().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_router_place(
    router: *mut RouterHandle,
    worker: u32,
    request: *const RequestFacts,
) -> Status {
    guard(|| {
        let router = handles::get::<OpenRouter>(router)?;
        // SAFETY: the caller passes a struct whose size it set, and strings or NULL in it.
        let facts = unsafe { Facts::read(&router, request) }?;
        let mut state = router.state.lock();
        state.check_new(facts.id)?;
        let view = state.worker(worker)?;
        if view.n_inflight >= view.n_slots {
            return Ok(Status::Full);
        }
        state.place(&facts.ask(), WorkerId(worker));
        Ok(Status::Ok)
    })
}

/// Says that request `id` has left the worker it was placed on: it ended, or never got there. Any thread.
///
/// Errors: ELDR_STATUS_ARGUMENT for a request that is not placed.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_router_leave(router: *mut RouterHandle, id: u64) -> Status {
    guard_done(|| {
        let router = handles::get::<OpenRouter>(router)?;
        let mut state = router.state.lock();
        let id = RequestId(id);
        let worker = state.placed.remove(&id).ok_or_else(|| {
            Failure::new(Status::Argument, format!("request {id} is on no worker; say once that a placed one has left"))
        })?;
        let view = &mut state.workers[worker.index()];
        // What was reported since may have counted it no more.
        view.n_inflight = view.n_inflight.saturating_sub(1);
        state.policy.left(id, worker);
        Ok(())
    })
}

/// Says that worker `worker` ran a decode step of `n_batch` sequences that did nothing else, in `time`, of any one unit:
/// `marginal_cost` learns from it what a step costs. Other policies do without. Any thread.
///
/// Errors: ELDR_STATUS_ARGUMENT for a time that is not above 0, and for a step of no sequence.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_router_step(router: *mut RouterHandle, worker: u32, n_batch: u32, time: f64) -> Status {
    guard_done(|| {
        let router = handles::get::<OpenRouter>(router)?;
        if !(time.is_finite() && time > 0.0) {
            return Err(Failure::new(Status::Argument, format!("a step can not take {time}; pass a time above 0")));
        }
        if n_batch == 0 {
            return Err(Failure::new(Status::Argument, "`n_batch` is 0; a step has one sequence at least"));
        }
        let mut state = router.state.lock();
        state.worker(worker)?;
        state.policy.stepped(WorkerId(worker), n_batch, time);
        Ok(())
    })
}
