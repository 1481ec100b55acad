//! Which workers take turns because their devices are behind a common RPC server.
//!
//! Never counts cores; [`ThreadPlan`](super::ThreadPlan) does.

use std::sync::Arc;

use crate::engine::Permits;

/// The turns of the workers on RPC servers: workers that share one take turns, and so do those that share another with
/// one of these, since each worker waits for one turn only.
///
/// ggml's client keeps in mind which graph a server ran last, and asks only for "the same again" where it is that one: two
/// contexts that compute at once make the server run the wrong one's.
#[derive(Debug, Clone, Default)]
pub(super) struct Turns(Vec<(Vec<String>, Arc<Permits>)>);

impl Turns {
    /// For workers that each use the servers of one of `lists`.
    pub fn new<'a>(lists: impl IntoIterator<Item = Vec<&'a str>>) -> Self {
        let mut groups: Vec<Vec<String>> = Vec::new();
        for list in lists.into_iter().filter(|list| !list.is_empty()) {
            let mut joined: Vec<String> = list.iter().map(|&server| server.to_owned()).collect();
            let touches = |group: &Vec<String>| group.iter().any(|server| list.contains(&server.as_str()));
            for group in groups.extract_if(.., |group| touches(group)) {
                joined.extend(group);
            }
            groups.push(joined);
        }
        Self(groups.into_iter().map(|group| (group, Arc::new(Permits::new(1)))).collect())
    }

    /// The turns of a worker on these servers; none if it uses none.
    pub fn of(&self, servers: &[&str]) -> Option<Arc<Permits>> {
        let group = self.0.iter().find(|(group, _)| group.iter().any(|server| servers.contains(&server.as_str())));
        group.map(|(_, permits)| Arc::clone(permits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_that_share_a_server_take_turns_however_indirectly() {
        let turns = Turns::new([vec!["a"], vec![], vec!["b"], vec!["c"], vec!["a", "b"], vec!["d", "e"]]);
        let same = |one: &[&str], other: &[&str]| {
            Arc::ptr_eq(&turns.of(one).expect("turns"), &turns.of(other).expect("turns"))
        };
        assert!(same(&["a"], &["b"]) && same(&["a", "b"], &["b"]) && same(&["d"], &["e", "d"]));
        assert!(!same(&["a"], &["c"]) && !same(&["b"], &["d"]));
        assert!(turns.of(&[]).is_none() && turns.of(&["f"]).is_none());
        assert_eq!(turns.of(&["c"]).expect("turns").n_at_once(), 1);
    }
}
