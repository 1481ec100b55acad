use std::fmt;

use serde::{Deserialize, Serialize};

/// A token id of the model's vocabulary.
pub type Token = i32;

/// A decode or prefill worker; prefill and decode workers are numbered apart, each from 0.
///
/// ```
/// use eldr::types::{RequestId, Slot, WorkerId};
///
/// assert_eq!(WorkerId(3).index(), 3);
/// assert_eq!(format!("request {} in slot {} of worker {}", RequestId(7), Slot(0), WorkerId(3)), "request 7 in slot 0 of worker 3");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WorkerId(pub u32);

/// A request, in order of submission, unique within one engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RequestId(pub u64);

/// A place for one sequence in a worker's batch; it is the sequence id in that worker's llama.cpp context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Slot(pub u32);

impl WorkerId {
    /// The worker's position in a list of workers.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl Slot {
    /// The slot's position in a list of slots.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
