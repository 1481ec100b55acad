//! Options about moves and feedback that no policy makes use of, in a sentence each.
//!
//! Never refuses one: what is asked for in vain does no harm, but whoever asked should know.

use eldr::route::PolicyKind;

use super::args::WorkerArgs;

impl WorkerArgs {
    /// What was asked for and changes nothing under the policies that route, each in a sentence.
    pub fn unused<'a>(&self, policies: impl IntoIterator<Item = &'a str>) -> Vec<String> {
        let policies: Vec<&str> = policies.into_iter().collect();
        let is_able = [PolicyKind::MarginalCost, PolicyKind::Auto].iter().any(|kind| policies.contains(&kind.name()));
        let is_vain = |given: Option<u32>| given.is_some_and(|every| every > 0) && !is_able;
        let why = format!("requests are routed by {}", policies.join(", "));
        let moves = is_vain(self.migrate_every)
            .then(|| format!("--migrate-every changes nothing: only marginal_cost moves running requests, and {why}"));
        let hears = is_vain(self.feedback).then(|| {
            format!("--feedback changes nothing: only marginal_cost goes by what running requests pick, and {why}")
        });
        moves.into_iter().chain(hears).collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        workers: WorkerArgs,
    }

    // Symptom: `--migrate-every 8 --feedback 8 --policy round_robin` started without a word, and did nothing.
    #[test]
    fn moves_and_feedback_that_no_policy_makes_use_of_are_told() {
        let unused = |args: &str, policies: &[&str]| {
            let args = ["eldr"].into_iter().chain(args.split_whitespace());
            Alone::try_parse_from(args).expect("valid").workers.unused(policies.iter().copied())
        };
        let both = "--migrate-every 8 --feedback 8";
        let told = unused(both, &["round_robin", "random"]);
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[0].starts_with("--migrate-every changes nothing: only marginal_cost"), "{told:?}");
        assert!(told[1].ends_with("and requests are routed by round_robin, random"), "{told:?}");
        for (args, policies) in [
            (both, &["marginal_cost"][..]),
            (both, &["round_robin", "marginal_cost"]),
            ("--migrate-every 0 --feedback 0", &["round_robin"]),
            ("", &["round_robin"]),
        ] {
            assert!(unused(args, policies).is_empty(), "{args} {policies:?}");
        }
    }
}
