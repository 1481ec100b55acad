//! Which devices the layers of one worker are divided over, and in which shares, as an entry says it.
//!
//! Never knows which devices there are.

/// Every GPU and RPC device there is, as a device's name.
const ALL: &str = "all";

const EXAMPLE: &str = "as in 1@cuda:0+cuda:1[split=3:1]";

/// The devices an entry names, in the order of their layers.
pub(super) fn names(device: &str) -> impl Iterator<Item = &str> {
    device.split('+').map(str::trim)
}

/// Whether an entry stands for every GPU and RPC device there is.
pub(super) fn is_all(device: &str) -> bool {
    device.trim().eq_ignore_ascii_case(ALL)
}

/// Reads `3:1`.
pub(super) fn shares(text: &str) -> Result<Vec<u32>, String> {
    let shares: Result<Vec<u32>, _> = text.split(':').map(|share| share.trim().parse()).collect();
    match shares {
        Ok(shares) if shares.contains(&0) => Err("gives a device a share of 0: leave that device out".to_owned()),
        Ok(shares) => Ok(shares),
        Err(_) => Err("sets split to no whole numbers with a colon between; write split=3:1".to_owned()),
    }
}

/// What is wrong with these devices and shares, as what goes on from the entry in a sentence.
pub(super) fn check(device: &str, shares: &[u32]) -> Result<(), String> {
    let names: Vec<&str> = names(device).collect();
    if let [name] = names[..] {
        let needs_more = !shares.is_empty() && !is_all(name);
        let why = || format!("divides layers among devices and names one: name more with a + between, {EXAMPLE}");
        return if needs_more { Err(why()) } else { Ok(()) };
    }
    let is_cpu = |name: &&str| name.split('[').next().is_some_and(|name| name.eq_ignore_ascii_case("cpu"));
    if names.contains(&"") {
        return Err(format!("names no device beside a +; write both, {EXAMPLE}"));
    }
    if names.iter().all(is_cpu) {
        return Err("divides layers among cpu alone, which is one device: write 1@cpu".to_owned());
    }
    if names.iter().any(is_cpu) {
        return Err(on_host());
    }
    if let Some(name) = names.iter().find(|name| name.ends_with(']')) {
        return Err(format!("has brackets behind {name}: the settings go behind the last device, {EXAMPLE}"));
    }
    if names.iter().any(|name| is_all(name)) {
        return Err("names other devices beside all, which is every GPU and RPC device: leave them out".to_owned());
    }
    if let Some(name) = twice(&names, |one, other| normal(one) == normal(other)) {
        return Err(once(name));
    }
    check_shares(names.len(), shares)
}

/// Shares are one a device, or none at all.
pub(super) fn check_shares(n_devices: usize, shares: &[u32]) -> Result<(), String> {
    if shares.is_empty() || shares.len() == n_devices {
        return Ok(());
    }
    Err(format!("gives {} to {}: give each one", counted(shares.len(), "share"), counted(n_devices, "device")))
}

fn counted(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// Why the host is no device of a split.
pub(super) fn on_host() -> String {
    "divides layers with cpu, which is the host: name the other devices alone, and leave the host the first layers with \
     n-gpu-layers=N in the brackets"
        .to_owned()
}

/// Why a device may not be there a second time.
pub(super) fn once(name: &str) -> String {
    format!("names {name} twice, and a device takes part once: leave one out")
}

/// One that is there a second time.
pub(super) fn twice<T>(all: &[T], is_same: impl Fn(&T, &T) -> bool) -> Option<&T> {
    all.iter().enumerate().find(|(at, one)| all[..*at].iter().any(|other| is_same(one, other))).map(|(_, one)| one)
}

/// Devices are found in any case, with a colon or without.
fn normal(name: &str) -> String {
    name.chars().filter(|&c| c != ':').map(|c| c.to_ascii_lowercase()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_shares_that_go_together() {
        for (device, of) in [
            ("cuda:0", &[][..]),
            ("cuda:0+cuda:1", &[]),
            ("cuda:0+cuda:1", &[3, 1]),
            ("rpc:[::1]:5000+rpc:h:5001+vulkan0", &[1, 1, 7]),
            ("all", &[3, 1]),
        ] {
            assert_eq!(check(device, of), Ok(()), "{device}");
        }
        assert_eq!(names("a + b").collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!((shares("3:1"), shares("2 : 2:5")), (Ok(vec![3, 1]), Ok(vec![2, 2, 5])));
    }

    #[test]
    fn what_can_not_be_divided_is_told_in_a_sentence() {
        for (device, of, want) in [
            ("cuda:0", &[3, 1][..], "names one"),
            ("cuda:0+", &[], "names no device beside a +"),
            ("cpu[0-3]+cpu", &[], "one device"),
            ("cpu+cuda:0", &[], "n-gpu-layers=N"),
            ("cuda:0+cpu[0-3]", &[], "n-gpu-layers=N"),
            ("cuda:0[cpu-moe]+cuda:1", &[], "brackets behind cuda:0[cpu-moe]"),
            ("all+cuda:1", &[], "beside all"),
            ("cuda:0+vulkan0+CUDA0", &[], "names CUDA0 twice"),
            ("cuda:0+cuda:1", &[1], "gives 1 share to 2 devices"),
            ("cuda:0+cuda:1", &[1, 2, 3], "gives 3 shares to 2 devices"),
        ] {
            let why = check(device, of).expect_err(device);
            assert!(why.contains(want), "{device}: {why}");
        }
        for (text, want) in [("3:0", "share of 0"), ("3:x", "write split=3:1"), ("", "whole"), ("0.5:0.5", "whole")] {
            let why = shares(text).expect_err(text);
            assert!(why.contains(want), "{text}: {why}");
        }
    }
}
