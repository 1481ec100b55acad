//! The table of handles: what C holds is a number that is looked up at every call.
//!
//! Never gives a number out twice, so a handle that was freed stays invalid for as long as the process runs.

use std::{
    any::Any,
    collections::BTreeMap,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use parking_lot::RwLock;

use super::{Status, failure::Failure};

/// Low bits of every handle: no pointer to anything aligned has them, so one passed by mistake is never a handle.
const MARK: usize = 0b1011;
const MARK_BITS: u32 = 4;

/// What a handle stands for. Shared with every call that is using it, so freeing the handle never pulls it away.
type Object = Arc<dyn Any + Send + Sync>;

// The one thing that is global: C has nowhere else to keep it.
static TABLE: RwLock<BTreeMap<usize, Entry>> = RwLock::new(BTreeMap::new());
static NEXT: AtomicUsize = AtomicUsize::new(1);

struct Entry {
    object: Object,
    kind: &'static str,
}

/// A kind of object with handles.
pub(super) trait Class: Any + Send + Sync {
    /// Its type in C.
    const NAME: &'static str;
    /// What a handle of it points to, as far as C knows.
    type Handle;
}

/// Makes a handle for `object`.
pub(super) fn insert<T: Class>(object: T) -> *mut T::Handle {
    let id = (NEXT.fetch_add(1, Ordering::Relaxed) << MARK_BITS) | MARK;
    TABLE.write().insert(id, Entry { object: Arc::new(object), kind: T::NAME });
    ptr::without_provenance_mut(id)
}

/// What `handle` stands for.
pub(super) fn get<T: Class>(handle: *const T::Handle) -> Result<Arc<T>, Failure> {
    if handle.is_null() {
        return Err(Failure::new(Status::Null, format!("the {} is NULL; open one first", T::NAME)));
    }
    let table = TABLE.read();
    let Some(entry) = table.get(&handle.addr()) else {
        let why = format!("this {name} was freed, or is no handle of eldr's; use one that is open", name = T::NAME);
        return Err(Failure::new(Status::Handle, why));
    };
    let kind = entry.kind;
    Arc::clone(&entry.object).downcast().map_err(|_| {
        Failure::new(Status::Handle, format!("an {kind} was passed where an {} is expected; pass the other", T::NAME))
    })
}

/// What `handle` stands for, or nothing for NULL, which is no mistake here.
pub(super) fn get_optional<T: Class>(handle: *const T::Handle) -> Result<Option<Arc<T>>, Failure> {
    if handle.is_null() { Ok(None) } else { get(handle).map(Some) }
}

/// What all open handles of a kind stand for.
pub(super) fn all<T: Class>() -> Vec<Arc<T>> {
    TABLE.read().values().filter_map(|entry| Arc::clone(&entry.object).downcast().ok()).collect()
}

/// Makes `handle` invalid and hands out what it stood for; nothing for NULL.
pub(super) fn remove<T: Class>(handle: *mut T::Handle) -> Result<Option<Arc<T>>, Failure> {
    let Some(object) = get_optional::<T>(handle)? else { return Ok(None) };
    // Two threads may both have found it; one of them takes it out.
    let taken = TABLE.write().remove(&handle.addr());
    match taken {
        Some(_) => Ok(Some(object)),
        None => Err(Failure::new(Status::Handle, format!("this {} was freed by another thread", T::NAME))),
    }
}

// What handles point to as far as C knows: cbindgen declares a struct that is not repr(C) and says no more of it.

/// A calibration: what turns counts into signatures, and one centroid a decode worker.
pub struct CalibrationHandle {
    _never_read: [u8; 0],
}

/// How often a prompt's tokens picked each expert.
pub struct CountsHandle {
    _never_read: [u8; 0],
}

/// The direction of a prompt's picks.
pub struct SignatureHandle {
    _never_read: [u8; 0],
}

/// A routing policy and the loads of the workers it chooses between.
pub struct RouterHandle {
    _never_read: [u8; 0],
}

/// Reads picks from the host's own llama.cpp while it computes.
pub struct TapHandle {
    _never_read: [u8; 0],
}

/// Picks of what the host's KV cache holds.
pub struct CacheHandle {
    _never_read: [u8; 0],
}

/// A model served by several workers.
pub struct EngineHandle {
    _never_read: [u8; 0],
}

/// A request that was submitted.
pub struct RequestHandle {
    _never_read: [u8; 0],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Apple;
    struct Pear;

    impl Class for Apple {
        const NAME: &'static str = "eldr_apple";
        type Handle = CountsHandle;
    }

    impl Class for Pear {
        const NAME: &'static str = "eldr_pear";
        type Handle = CountsHandle;
    }

    fn status<T>(result: Result<T, Failure>) -> Option<Status> {
        result.err().map(|failure| failure.status())
    }

    #[test]
    fn a_handle_works_until_it_is_freed_and_never_again() {
        let handle = insert(Apple);
        assert_eq!(status(get::<Apple>(handle)), None);
        assert_eq!(status(get::<Pear>(handle)), Some(Status::Handle));
        let inside = get::<Apple>(handle).expect("open");
        assert!(all::<Apple>().iter().any(|open| Arc::ptr_eq(open, &inside)));
        assert_eq!(status(remove::<Apple>(handle)), None);
        assert_eq!(Arc::strong_count(&inside), 1, "a call that holds it may go on");
        for _ in 0..100 {
            assert_ne!(insert(Apple), handle);
        }
        assert_eq!(status(get::<Apple>(handle)), Some(Status::Handle));
        assert_eq!(status(remove::<Apple>(handle)), Some(Status::Handle));
    }

    #[test]
    fn null_and_pointers_of_the_host_are_no_handles() {
        assert_eq!(status(get::<Apple>(ptr::null())), Some(Status::Null));
        assert_eq!(status(remove::<Apple>(ptr::null_mut())), None);
        let local = 7u64;
        assert_eq!(status(get::<Apple>((&raw const local).cast())), Some(Status::Handle));
    }

    #[test]
    fn of_many_threads_that_free_a_handle_one_does() {
        let address = insert(Apple).expose_provenance();
        let freed: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| scope.spawn(move || remove::<Apple>(ptr::without_provenance_mut(address)).is_ok()))
                .collect();
            threads.into_iter().map(|thread| usize::from(thread.join().expect("no panic"))).sum()
        });
        assert_eq!(freed, 1);
    }
}
