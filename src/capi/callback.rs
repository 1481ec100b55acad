use std::{
    ffi::c_void,
    io, ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use super::{Event, RequestHandle, request::Routed};
use crate::engine::TokenStream;

/// Gets what happens to a request, one event after another, on a thread that eldr starts for it. `event` lives for the
/// call. Answers whether to go on: false cancels the request, and no more calls follow.
///
/// It may call anything of eldr, eldr_request_cancel() and eldr_request_free() of its own request, too. It must not throw.
pub type EventCallback =
    Option<unsafe extern "C" fn(request: *mut RequestHandle, event: *const Event, user: *mut c_void) -> bool>;

/// A callback that is there, and its user data.
#[derive(Clone, Copy)]
pub(super) struct Listener {
    pub callback: unsafe extern "C" fn(*mut RequestHandle, *const Event, *mut c_void) -> bool,
    pub user: *mut c_void,
}

// SAFETY: the header says that it is called on a thread of eldr's, so the host gave it to be.
unsafe impl Send for Listener {}

/// The thread that calls the host.
pub(super) struct Caller {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Caller {
    /// Calls `listener` for every event of `stream` on a new thread, as long as it wants more; `handle` is the number of
    /// the request's handle.
    pub(super) fn start(
        mut stream: TokenStream,
        routed: Arc<Routed>,
        listener: Listener,
        handle: usize,
    ) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let call = move || {
            // The whole of it is moved here, not only its fields, which are not `Send` by themselves.
            let listener: Listener = listener;
            while let Some(event) = stream.next() {
                if stopped.load(Ordering::Acquire) {
                    break;
                }
                routed.note(&event);
                let event = Event::of(&event);
                let request = ptr::without_provenance_mut(handle);
                // SAFETY: the host's function and data, which stay until the request is freed, and that waits for this.
                let goes_on = unsafe { (listener.callback)(request, &raw const event, listener.user) };
                if !goes_on {
                    break;
                }
            }
        };
        let thread = thread::Builder::new().name("eldr callback".to_owned()).spawn(call)?;
        Ok(Self { stop, thread })
    }

    /// Lets no further call begin, and waits for the one that runs, unless this is it.
    pub(super) fn stop(self) {
        self.stop.store(true, Ordering::Release);
        if self.thread.thread().id() != thread::current().id() && self.thread.join().is_err() {
            log::error!("a callback's thread panicked");
        }
    }
}
