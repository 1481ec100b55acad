use std::{collections::VecDeque, sync::Arc, time::Duration};

use crate::signature::Signature;

/// The newest signatures, oldest first, bounded by number and age.
///
/// They are shared, so that a snapshot for a fit copies pointers and not vectors. At most `max_signatures` are held here
/// and as many more by a job that is out.
#[derive(Debug)]
pub(super) struct Window {
    signatures: VecDeque<(Duration, Arc<Signature>)>,
    max_signatures: usize,
    max_age: Duration,
}

impl Window {
    pub fn new(max_signatures: usize, max_age: Duration) -> Self {
        Self { signatures: VecDeque::new(), max_signatures, max_age }
    }

    pub fn push(&mut self, signature: Signature, now: Duration) {
        if self.signatures.len() == self.max_signatures {
            self.signatures.pop_front();
        }
        self.signatures.push_back((now, Arc::new(signature)));
        self.forget(now);
    }

    /// Drops what is older than the longest age at time `now`.
    pub fn forget(&mut self, now: Duration) {
        while self.signatures.front().is_some_and(|(at, _)| now.saturating_sub(*at) > self.max_age) {
            self.signatures.pop_front();
        }
    }

    pub fn len(&self) -> usize {
        self.signatures.len()
    }

    pub fn snapshot(&self) -> Vec<Arc<Signature>> {
        self.signatures.iter().map(|(_, signature)| Arc::clone(signature)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_and_age_bound_it() {
        let signature = |i: u16| Signature::normalised(vec![f32::from(i), 1.0]).expect("not zero");
        let mut window = Window::new(3, Duration::from_secs(10));
        for i in 0..5 {
            window.push(signature(i), Duration::from_secs(u64::from(i)));
        }
        let held = |window: &Window| window.snapshot().iter().map(|s| (**s).clone()).collect::<Vec<_>>();
        assert_eq!(held(&window), [2, 3, 4].map(signature));
        window.forget(Duration::from_secs(13));
        assert_eq!(held(&window), [3, 4].map(signature));
        window.push(signature(9), Duration::from_secs(14));
        assert_eq!(held(&window), [4, 9].map(signature));
        window.forget(Duration::from_secs(60));
        assert_eq!(window.len(), 0);
    }
}
