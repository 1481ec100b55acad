use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use cpu_time::ThreadTime;

thread_local! {
    /// What this thread's calls were charged in all.
    static CHARGED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// Lets what the calling thread does take so much longer, for a [`Stopwatch::Charged`].
pub(super) fn charge(took: Duration) {
    CHARGED.set(CHARGED.get() + took);
}

/// How a bench times what it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopwatch {
    /// By the wall clock.
    Wall,
    /// By the calling thread's CPU time, which other programs on the machine do not lengthen. Only for what runs in that
    /// thread from beginning to end and never waits.
    Thread,
    /// By what the calling thread was charged ([`crate::bench::ChargedRunner`]), the same on every machine.
    Charged,
}

/// A [`Stopwatch`] that runs.
#[derive(Debug, Clone, Copy)]
pub enum Running {
    /// Since then on the wall clock.
    Wall(Instant),
    /// Since then in this thread.
    Thread(ThreadTime),
    /// Since this thread had been charged so much.
    Charged(Duration),
}

impl Stopwatch {
    /// Starts it.
    pub fn start(self) -> Running {
        match self {
            Self::Wall => Running::Wall(Instant::now()),
            Self::Thread => Running::Thread(ThreadTime::now()),
            Self::Charged => Running::Charged(CHARGED.get()),
        }
    }
}

impl Running {
    /// Time since the start.
    pub fn elapsed(self) -> Duration {
        match self {
            Self::Wall(start) => start.elapsed(),
            Self::Thread(start) => start.elapsed(),
            Self::Charged(start) => CHARGED.get().saturating_sub(start),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threads_time_stands_still_while_it_sleeps() {
        let (wall, thread) = (Stopwatch::Wall.start(), Stopwatch::Thread.start());
        std::thread::sleep(Duration::from_millis(50));
        assert!(wall.elapsed() >= Duration::from_millis(50));
        assert!(thread.elapsed() < wall.elapsed());
    }
}
