//! The threads that call the host with what happens to its requests.
//!
//! Never lets two of them wait for each other.

use std::{
    cell::Cell,
    collections::BTreeMap,
    ffi::c_void,
    io, ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use parking_lot::Mutex;

use super::{Event, RequestHandle, request::Routed, stopping::Stopping};

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

thread_local! {
    /// The request whose callbacks this thread makes, by its handle's number.
    static CALLS: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Of the callbacks that wait for another one to return, which, by their requests' handles.
static WAITS: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// The thread that calls the host.
pub(super) struct Caller {
    handle: usize,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Caller {
    /// Calls `listener` for every event of `stream` on a new thread, as long as it wants more; `handle` is the number of
    /// the request's handle.
    pub(super) fn start(
        mut stream: Stopping,
        routed: Arc<Routed>,
        listener: Listener,
        handle: usize,
    ) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let call = move || {
            // The whole of it is moved here, not only its fields, which are not `Send` by themselves.
            let listener: Listener = listener;
            CALLS.set(Some(handle));
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
        Ok(Self { handle, stop, thread })
    }

    /// Lets no further call begin, and waits for the one that runs, unless this is it. False if it did not wait, because
    /// the one that runs waits for the one that asks.
    pub(super) fn stop(self) -> bool {
        self.stop.store(true, Ordering::Release);
        let caller = CALLS.get();
        if caller == Some(self.handle) {
            return true;
        }
        let Some(caller) = caller else {
            self.join();
            return true;
        };
        {
            let mut waits = WAITS.lock();
            let mut last = self.handle;
            while let Some(&next) = waits.get(&last) {
                last = next;
            }
            if last == caller {
                return false;
            }
            waits.insert(caller, self.handle);
        }
        self.join();
        WAITS.lock().remove(&caller);
        true
    }

    fn join(self) {
        if self.thread.join().is_err() {
            log::error!("a callback's thread panicked");
        }
    }
}
