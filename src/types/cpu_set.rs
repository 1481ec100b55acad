use std::{fmt, str::FromStr};

use super::shown;

/// Processors by the system's numbers, as Linux writes them: `0-3,8`.
///
/// ```
/// use eldr::types::CpuSet;
///
/// let cpus: CpuSet = "0-3,8".parse().expect("a list");
/// assert_eq!((cpus.cpus(), cpus.len()), (&[0, 1, 2, 3, 8][..], 5));
/// assert_eq!(cpus.without(&CpuSet::new([8])), "0-3".parse().expect("a list"));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct CpuSet(Vec<u32>);

/// Most processors ggml can be pinned to (`GGML_MAX_N_THREADS`).
const MAX_CPUS: u32 = 512;

impl CpuSet {
    /// These processors, in order and each once.
    pub fn new(cpus: impl IntoIterator<Item = u32>) -> Self {
        let mut cpus: Vec<u32> = cpus.into_iter().collect();
        cpus.sort_unstable();
        cpus.dedup();
        Self(cpus)
    }

    /// Their numbers, ascending.
    pub fn cpus(&self) -> &[u32] {
        &self.0
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those that are in both.
    #[must_use]
    pub fn common(&self, other: &Self) -> Self {
        Self(self.0.iter().filter(|cpu| other.0.contains(cpu)).copied().collect())
    }

    /// Those that are not in `other`.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        Self(self.0.iter().filter(|cpu| !other.0.contains(cpu)).copied().collect())
    }

    /// `n` disjoint sets, in order, whose sizes differ by at most one; none if there are fewer processors.
    pub fn split(&self, n: usize) -> Option<Vec<Self>> {
        if n == 0 || self.len() < n {
            return None;
        }
        let edge = |part: usize| part * self.len() / n;
        Some((0..n).map(|part| Self(self.0[edge(part)..edge(part + 1)].to_vec())).collect())
    }
}

impl FromStr for CpuSet {
    type Err = String;

    fn from_str(list: &str) -> Result<Self, String> {
        let wrong = |item: &str| format!("'{}' is no processor or range of them; write 3 or 0-7", shown(item.trim()));
        let mut cpus = Vec::new();
        for item in list.split(',') {
            let (first, last) = item.split_once('-').unwrap_or((item, item));
            let number = |text: &str| text.trim().parse::<u32>().map_err(|_| wrong(item));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(format!("'{}' runs backwards; write {last}-{first}", shown(item.trim())));
            }
            if last >= MAX_CPUS {
                return Err(format!("processor {last} is beyond the {MAX_CPUS} that ggml can be pinned to"));
            }
            cpus.extend(first..=last);
        }
        Ok(Self::new(cpus))
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.as_slice();
        while let Some(&first) = rest.first() {
            let n = rest.iter().zip(first..).take_while(|&(&cpu, want)| cpu == want).count();
            let comma = if rest.len() == self.0.len() { "" } else { "," };
            match n {
                1 => write!(f, "{comma}{first}")?,
                n => write!(f, "{comma}{first}-{}", rest[n - 1])?,
            }
            rest = &rest[n..];
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn sets_read_back_as_written_and_split_without_loss(cpus in prop::collection::vec(0..MAX_CPUS, 1..40), n in 1..9usize) {
            let set = CpuSet::new(cpus);
            prop_assert_eq!(set.to_string().parse::<CpuSet>(), Ok(set.clone()));
            match set.split(n) {
                None => prop_assert!(set.len() < n),
                Some(parts) => {
                    prop_assert_eq!(parts.iter().flat_map(|part| part.cpus().to_vec()).collect::<Vec<_>>(), set.cpus());
                    let sizes = parts.iter().map(CpuSet::len);
                    prop_assert!(sizes.clone().max() <= sizes.min().map(|least| least + 1));
                }
            }
        }
    }

    #[test]
    fn a_wrong_set_says_what_is_wrong() {
        for (text, want) in
            [("", "'' is no processor"), ("1-", "'1-' is no"), ("7-3", "write 3-7"), ("0,512", "beyond the 512")]
        {
            let error = text.parse::<CpuSet>().expect_err(text);
            assert!(error.contains(want), "{text}: {error}");
        }
        let set: CpuSet = "0-3,8".parse().expect("valid");
        let other: CpuSet = "2-9".parse().expect("valid");
        assert_eq!((set.common(&other).to_string(), set.without(&other).to_string()), ("2-3,8".into(), "0-1".into()));
    }
}
