use std::fs;

/// Bytes of the host's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HostMemory {
    /// What can be had now without swapping; pages of files are given up for it.
    pub free: u64,
    pub total: u64,
}

impl HostMemory {
    /// This machine's, within the limit of the control group if that is tighter; none where neither is told.
    pub fn detect() -> Option<Self> {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let stat = read("/sys/fs/cgroup/memory.stat");
        Self::of(
            &read("/proc/meminfo"),
            &read("/sys/fs/cgroup/memory.max"),
            &read("/sys/fs/cgroup/memory.current"),
            &stat,
        )
    }

    fn of(meminfo: &str, limit: &str, used: &str, stat: &str) -> Option<Self> {
        let field = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
        };
        let (free, total) = (field("MemAvailable:")?, field("MemTotal:")?);
        let whole = Self { free, total };
        let (Ok(limit), Ok(used)) = (limit.trim().parse::<u64>(), used.trim().parse::<u64>()) else {
            return Some(whole);
        };
        // As of the machine, pages of files that can be given up are not counted as used.
        let file = stat.lines().find_map(|line| line.strip_prefix("inactive_file "));
        let file = file.and_then(|bytes| bytes.trim().parse().ok()).unwrap_or(0);
        let left = limit.saturating_sub(used.saturating_sub(file));
        Some(Self { free: free.min(left), total: total.min(limit) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tighter_of_machine_and_control_group_counts() {
        let meminfo = "MemTotal:  100 kB\nMemFree:  1 kB\nMemAvailable:  50 kB\n";
        let of =
            |limit, used, stat| HostMemory::of(meminfo, limit, used, stat).map(|m| (m.free / 1024, m.total / 1024));
        assert_eq!(of("max\n", "5", ""), Some((50, 100)));
        assert_eq!(of("", "", ""), Some((50, 100)));
        assert_eq!(of("40960", "30720", "anon 1\ninactive_file 10240\n"), Some((20, 40)));
        assert_eq!(of("40960", "99999", ""), Some((0, 40)));
        assert_eq!(HostMemory::of("", "1", "1", ""), None);
    }
}
