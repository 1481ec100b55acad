//! Repeats put together, and which settings differ at all.
//!
//! Never mixes rows of different settings.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{Row, Rows};
use crate::{route::PolicyKind, sim::Interval};

/// What tells repeats of one measurement apart.
const REPEATS: [&str; 2] = ["seed", "repeat"];

/// The repeats of one measurement.
pub(super) struct Group {
    pub verb: String,
    pub setting: BTreeMap<String, Value>,
    pub samples: BTreeMap<String, Vec<f64>>,
}

/// The groups in order of their first rows.
pub(super) fn groups(rows: &Rows) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for Row { verb, setting, measured } in &rows.rows {
        let mut setting = setting.clone();
        setting.retain(|name, _| !REPEATS.contains(&name.as_str()));
        let known = groups.iter().position(|group| group.verb == *verb && group.setting == setting);
        let at = known.unwrap_or_else(|| {
            groups.push(Group { verb: verb.clone(), setting, samples: BTreeMap::new() });
            groups.len() - 1
        });
        for (name, &value) in measured {
            groups[at].samples.entry(name.clone()).or_default().push(value);
        }
    }
    groups
}

impl Group {
    /// The mean over repeats, and its 95% interval where there are 2 to 20.
    pub fn measured(&self, name: &str) -> Option<(f64, Option<(f64, f64)>)> {
        let samples = self.samples.get(name)?;
        if (2..=20).contains(&samples.len()) {
            let Interval { mean, low, high } = Interval::of(samples);
            return Some((mean, Some((low, high))));
        }
        Some((samples.iter().sum::<f64>() / samples.len() as f64, None))
    }

    pub fn shown(&self, setting: &str) -> String {
        self.setting.get(setting).map_or_else(String::new, shown)
    }

    pub fn is_balancer(&self) -> bool {
        let policy =
            self.setting.get("policy").and_then(Value::as_str).and_then(|name| name.parse::<PolicyKind>().ok());
        policy.is_some_and(PolicyKind::is_load_balancer)
    }

    /// Of the same verb and settings, but for the policy.
    pub fn is_peer(&self, other: &Self) -> bool {
        let but_policy = |group: &Self| {
            let mut setting = group.setting.clone();
            setting.remove("policy");
            setting.remove("tau");
            setting.remove("clairvoyant");
            setting.remove("clusters");
            setting.remove("refit");
            setting
        };
        self.verb == other.verb && but_policy(self) == but_policy(other)
    }

    /// The change of a mean against the lowest of the load balancers among its peers, as a share.
    pub fn change(&self, name: &str, all: &[Self]) -> Option<f64> {
        let balancers = all.iter().filter(|other| other.is_balancer() && other.is_peer(self));
        let best = balancers.filter_map(|other| other.measured(name)).map(|(mean, _)| mean).min_by(f64::total_cmp)?;
        let (own, _) = self.measured(name)?;
        (best > 0.0).then(|| own / best - 1.0)
    }
}

/// A setting's value as people write it.
pub(super) fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The settings that differ among the groups, by name.
pub(super) fn varying(groups: &[&Group]) -> Vec<String> {
    let names: BTreeSet<&String> = groups.iter().flat_map(|group| group.setting.keys()).collect();
    let differs = |name: &&String| groups.iter().any(|group| group.setting.get(*name) != groups[0].setting.get(*name));
    names.into_iter().filter(differs).cloned().collect()
}

/// The settings that are the same in all groups, with their values.
pub(super) fn constant(groups: &[&Group]) -> Vec<(String, String)> {
    let varying = varying(groups);
    let own = groups.first().into_iter().flat_map(|group| &group.setting);
    own.filter(|(name, _)| !varying.contains(name)).map(|(name, value)| (name.clone(), shown(value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::rows::tests::sample;

    #[test]
    fn repeats_are_one_group_and_changes_are_against_peers() {
        let groups = groups(&sample());
        assert_eq!(groups.len(), 4);
        let (mean, interval) = groups[1].measured("tpot_p50_ms").expect("measured");
        assert!((mean - 18.0).abs() < 1e-9 && interval.is_some_and(|(low, high)| low < 16.0 && high > 20.0));
        let change = |at: usize| groups[at].change("tpot_p50_ms", &groups);
        assert!(change(0).is_some_and(|x| x.abs() < 1e-12) && change(3).is_some_and(|x| (x + 0.1).abs() < 1e-9));
        assert_eq!(groups[3].change("nothing", &groups), None);
    }

    #[test]
    fn what_varies_is_told_from_what_does_not() {
        let groups = groups(&sample());
        let all: Vec<&Group> = groups.iter().collect();
        assert_eq!(varying(&all), ["policy", "rate"]);
        assert_eq!(constant(&all), [("workers".to_owned(), "8".to_owned())]);
    }
}
