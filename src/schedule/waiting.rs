//! Requests that wait for a slot, and which of them may go first.
//!
//! Never compares requests: it says whose turn can not be put off.

use std::collections::VecDeque;

/// A queue whose front may be overtaken, but by so many only.
///
/// Time is counted in places given. One that joins behind n others would be given the (n + 1)-th place from now in turn,
/// and is given one of the first `age_bound * (n + 1)`, whatever is chosen in between.
#[derive(Debug)]
pub(super) struct Waiting<T> {
    age_bound: u64,
    n_given: u64,
    /// Each with the number of the last place it can be given, which never falls from front to back.
    items: VecDeque<(T, u64)>,
}

impl<T> Waiting<T> {
    /// An empty queue; with an `age_bound` of 1 everybody goes in turn.
    pub(super) fn new(age_bound: u32) -> Self {
        Self { age_bound: u64::from(age_bound.max(1)), n_given: 0, items: VecDeque::new() }
    }

    pub(super) fn push(&mut self, item: T) {
        let due = self.n_given + self.age_bound * (self.items.len() as u64 + 1) - 1;
        // Whoever was here before goes no later than the newcomer must.
        for (_, earlier) in self.items.iter_mut().rev().take_while(|(_, earlier)| *earlier > due) {
            *earlier = due;
        }
        self.items.push_back((item, due));
    }

    /// Any of the first so many may be given the next place.
    pub(super) fn n_choices(&self) -> usize {
        if self.age_bound == 1 {
            return self.items.len().min(1);
        }
        let next = self.n_given;
        let is_pressing = |(at, (_, due)): (usize, &(T, u64))| *due <= next + at as u64;
        self.items.iter().enumerate().position(is_pressing).map_or(self.items.len(), |at| at + 1)
    }

    pub(super) fn get(&self, at: usize) -> Option<&T> {
        self.items.get(at).map(|(item, _)| item)
    }

    /// Gives the next place to the one at `at`, which is below [`Waiting::n_choices`].
    pub(super) fn take(&mut self, at: usize) -> T {
        self.n_given += 1;
        self.items.remove(at).expect("one that waits").0
    }

    pub(super) fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        self.items.retain(|(item, _)| keep(item));
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = T> {
        self.items.drain(..).map(|(item, _)| item)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.items.iter().map(|(item, _)| item)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.items.iter_mut().map(|(item, _)| item)
    }

    pub(super) fn len(&self) -> usize {
        self.items.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn in_turn_there_is_no_choice() {
        let mut waiting = Waiting::new(1);
        (0..3).for_each(|item| waiting.push(item));
        assert_eq!((waiting.n_choices(), waiting.take(0), waiting.n_choices()), (1, 0, 1));
    }

    #[test]
    fn the_oldest_is_overtaken_until_its_last_place() {
        let mut waiting = Waiting::new(3);
        (0..2).for_each(|item| waiting.push(item));
        // The first must have one of the places 0 to 2.
        assert_eq!((waiting.n_choices(), waiting.take(1)), (2, 1));
        waiting.push(2);
        assert_eq!((waiting.n_choices(), waiting.take(1)), (2, 2));
        waiting.push(3);
        assert_eq!((waiting.n_choices(), waiting.take(0)), (1, 0));
    }

    proptest! {
        #[test]
        fn nobody_waits_longer_than_the_bound(
            age_bound in 1u32..5,
            steps in prop::collection::vec((0u8..5, any::<prop::sample::Index>()), 1..300),
        ) {
            let mut waiting = Waiting::new(age_bound);
            let mut n_given = 0;
            let mut n_joined = 0;
            for (what, which) in steps {
                let n = waiting.len();
                match what {
                    0 | 1 => {
                        waiting.push((n_joined, n_given + u64::from(age_bound) * (n as u64 + 1)));
                        n_joined += 1;
                    }
                    2 if n > 0 => {
                        let gone = waiting.get(which.index(n)).expect("one that waits").0;
                        waiting.retain(|(id, _)| *id != gone);
                    }
                    _ if n > 0 => {
                        let n_choices = waiting.n_choices();
                        prop_assert!((1..=n).contains(&n_choices) && (age_bound > 1 || n_choices == 1));
                        let (_, until) = waiting.take(which.index(n_choices));
                        n_given += 1;
                        prop_assert!(n_given <= until, "place {} for one due by {}", n_given, until);
                    }
                    _ => {}
                }
            }
        }
    }
}
