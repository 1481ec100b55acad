use parking_lot::{Condvar, Mutex};

/// How many workers may use one device at once, in order of asking.
///
/// ggml's threads spin at every barrier: more of them than cores is a collapse, not a slowdown. Workers on the same
/// cores share one `Permits`, so the threads that run together never pass the cores.
///
/// ```
/// use eldr::engine::{Permit, Permits, ThreadPlan};
///
/// let permits = Permits::new(1);
/// let turn: Permit<'_> = permits.acquire();
/// drop(turn); // the next worker's turn
///
/// // The cores divided among four workers: the threads that compute at once never pass them.
/// let plan: ThreadPlan = ThreadPlan::new(0, 4)?;
/// assert!(plan.n_threads >= 1 && plan.permits.n_at_once() >= 1);
/// # Ok::<(), eldr::EngineError>(())
/// ```
#[derive(Debug)]
pub struct Permits {
    n_at_once: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    n_free: usize,
    next_ticket: u64,
    serving: u64,
}

/// Leave to compute, given back on drop.
#[derive(Debug)]
pub struct Permit<'a>(&'a Permits);

impl Permits {
    /// `n` workers at once; at least one.
    pub fn new(n: usize) -> Self {
        let n_at_once = n.max(1);
        let state = State { n_free: n_at_once, next_ticket: 0, serving: 0 };
        Self { n_at_once, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Workers that may compute at once.
    pub fn n_at_once(&self) -> usize {
        self.n_at_once
    }

    /// Waits for a turn.
    pub fn acquire(&self) -> Permit<'_> {
        let mut state = self.state.lock();
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        while state.serving != ticket || state.n_free == 0 {
            self.changed.wait(&mut state);
        }
        state.serving += 1;
        state.n_free -= 1;
        self.changed.notify_all();
        Permit(self)
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.state.lock().n_free += 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn never_more_than_the_permits_compute_at_once() {
        let permits = Permits::new(2);
        let (inside, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let _permit = permits.acquire();
                        most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        std::thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!(most.load(Ordering::SeqCst), 2);
    }
}
