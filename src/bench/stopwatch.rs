use std::time::{Duration, Instant};

use cpu_time::ThreadTime;

/// How a bench times what it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopwatch {
    /// By the wall clock.
    Wall,
    /// By the calling thread's CPU time, which other programs on the machine do not lengthen. Only for what runs in that
    /// thread from beginning to end and never waits.
    Thread,
}

/// A [`Stopwatch`] that runs.
#[derive(Debug, Clone, Copy)]
pub enum Running {
    /// Since then on the wall clock.
    Wall(Instant),
    /// Since then in this thread.
    Thread(ThreadTime),
}

impl Stopwatch {
    /// Starts it.
    pub fn start(self) -> Running {
        match self {
            Self::Wall => Running::Wall(Instant::now()),
            Self::Thread => Running::Thread(ThreadTime::now()),
        }
    }
}

impl Running {
    /// Time since the start.
    pub fn elapsed(self) -> Duration {
        match self {
            Self::Wall(start) => start.elapsed(),
            Self::Thread(start) => start.elapsed(),
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
