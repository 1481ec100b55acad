use std::{
    ffi::c_char,
    mem::MaybeUninit,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::{
    Event, RequestHandle, Status, args,
    callback::Caller,
    failure::{self, Failure, guard, guard_done},
    handles::{self, Class},
    stopping::Stopping,
};
use crate::{
    engine::{Canceller, StreamEvent},
    route::Decision,
};

pub(super) struct OpenRequest {
    pub(super) id: u64,
    pub(super) canceller: Canceller,
    pub(super) events: Events,
    pub(super) routed: Arc<Routed>,
}

/// The request's decisions, as they were read.
#[derive(Default)]
pub(super) struct Routed(Mutex<Vec<Decision>>);

impl Routed {
    pub(super) fn note(&self, event: &StreamEvent) {
        if let StreamEvent::Routed { decision, .. } = event {
            self.0.lock().push(decision.as_ref().clone());
        }
    }
}

/// Who reads what happens to the request.
pub(super) enum Events {
    /// The host, by eldr_request_next().
    Asked(Mutex<Stopping>),
    /// A thread that calls the host; none before it started and after it was stopped.
    Called(Mutex<Option<Caller>>),
}

impl Class for OpenRequest {
    const NAME: &'static str = "eldr_request";
    type Handle = RequestHandle;
}

/// Waits up to `timeout_ms` milliseconds (0 does not wait, below 0 for ever) for the next event of a request without a
/// callback and fills `event`, whose `size` is set. Any thread; several that wait for one request take turns.
///
/// ELDR_STATUS_WAIT if nothing happened in time, ELDR_STATUS_END once everything was read; `event` tells nothing then, so
/// keep what the last one told.
/// Errors: ELDR_STATUS_ARGUMENT for a request that has a callback.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_request_next(request: *mut RequestHandle, timeout_ms: i64, event: *mut Event) -> Status {
    guard(|| {
        let request = handles::get::<OpenRequest>(request)?;
        // SAFETY: the caller passes a struct whose size it set; an event that could not be written would be lost.
        unsafe { args::fill(event, &<Event as args::Growing>::defaults(), "event") }?;
        let Events::Asked(stream) = &request.events else {
            let why = "the request's events go to its callback; submit it without one to ask for them";
            return Err(Failure::new(Status::Argument, why));
        };
        let until = match u64::try_from(timeout_ms) {
            Ok(ms) => Instant::now().checked_add(Duration::from_millis(ms)),
            Err(_) => None,
        };
        let stream = match until {
            Some(until) => stream.try_lock_until(until),
            None => Some(stream.lock()),
        };
        let Some(mut stream) = stream else { return Ok(Status::Wait) };
        match next_until(&mut stream, until) {
            Poll::Pending => Ok(Status::Wait),
            Poll::Ready(None) => Ok(Status::End),
            Poll::Ready(Some(next)) => {
                request.routed.note(&next);
                // SAFETY: as above.
                unsafe { args::fill(event, &Event::of(&next), "event") }?;
                Ok(Status::Ok)
            }
        }
    })
}

/// Asks for an early end: what was drawn before and the end still come. Does nothing to a request that has ended. Any
/// thread, callbacks too.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_request_cancel(request: *const RequestHandle) -> Status {
    guard_done(|| {
        handles::get::<OpenRequest>(request)?.canceller.cancel();
        Ok(())
    })
}

/// Writes the request's number, unique within its engine, to `id`. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_request_get_id(
    request: *const RequestHandle,
    id: Option<&mut MaybeUninit<u64>>,
) -> Status {
    guard_done(|| args::put(id, handles::get::<OpenRequest>(request)?.id, "id"))
}

/// Writes why the request went where it went to `json`: an array of its decisions, one for each time that it was routed,
/// as far as their events were read or called for. eldr owns the text; it stays until the thread's next call that gives out
/// text. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_request_explain_json(
    request: *const RequestHandle,
    json: Option<&mut MaybeUninit<*const c_char>>,
) -> Status {
    guard_done(|| {
        let request = handles::get::<OpenRequest>(request)?;
        let text = serde_json::to_string(&*request.routed.0.lock())
            .map_err(|error| Failure::new(Status::Run, format!("the decisions are not JSON: {error}")))?;
        args::put(json, failure::lend(&text), "json")
    })
}

/// Cancels the request unless it has ended, and frees the handle; NULL is let pass. Any thread.
///
/// When it returns, the request's callback does not run and will not again, so its user data may go. Called from that
/// callback itself, this holds from the callback's return on. A thread that waits in eldr_request_next() gets the end.
///
/// ELDR_STATUS_WAIT if it is called from a callback that the request's own callback waits for, to free it: the handle is
/// freed, but the request's callback runs on until this one returns, so its user data must stay until then.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_request_free(request: *mut RequestHandle) -> Status {
    guard(|| {
        let Some(request) = handles::remove::<OpenRequest>(request)? else { return Ok(Status::Ok) };
        request.canceller.cancel();
        let Events::Called(caller) = &request.events else { return Ok(Status::Ok) };
        let caller = caller.lock().take();
        Ok(if caller.is_none_or(Caller::stop) { Status::Ok } else { Status::Wait })
    })
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// The next event, or that there is none before `until`.
fn next_until(stream: &mut Stopping, until: Option<Instant>) -> Poll<Option<StreamEvent>> {
    let mut next = pin!(stream.next_async());
    // Mostly there is one already, and then nothing has to be woken.
    if let Poll::Ready(event) = next.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        return Poll::Ready(event);
    }
    if until.is_some_and(|until| until <= Instant::now()) {
        return Poll::Pending;
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(event) = next.as_mut().poll(&mut context) {
            return Poll::Ready(event);
        }
        match until {
            None => thread::park(),
            Some(until) => match until.checked_duration_since(Instant::now()) {
                Some(left) if !left.is_zero() => thread::park_timeout(left),
                _ => return Poll::Pending,
            },
        }
    }
}
