use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{
    engine::{EngineError, split},
    types::{CpuSet, shown},
};

/// Some workers in one place, and what is set for them alone: `2@cuda:0`, `2@cpu[0-7]`, `1@rpc:HOST:PORT`,
/// `2@cuda:1[threads=2,cpu-moe]`, `2@cuda:0+cuda:1[split=3:1]` with the model's layers divided over both devices, `2@all`
/// with them divided over every GPU and RPC device there is, or `8` for the best device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WorkerSpec {
    /// How many; at least 1.
    pub n: u32,
    /// A ggml device by name or index, or `rpc:HOST:PORT`; several with a `+` between, the first layers on the first; `all`;
    /// none is the best device there is.
    pub device: Option<String>,
    /// Shares of the layers, one for each device; none divides them by the devices' free memory.
    pub split: Vec<u32>,
    /// Processors that are theirs alone, divided among them.
    pub cpus: Option<CpuSet>,
    /// Threads of each, instead of [`EngineConfig::n_threads`](super::EngineConfig::n_threads).
    pub n_threads: Option<u32>,
    /// Tokens each computes at once, instead of the chunk.
    pub n_batch: Option<u32>,
    /// Layers on the device, instead of [`EngineConfig::n_gpu_layers`](super::EngineConfig::n_gpu_layers).
    pub n_gpu_layers: Option<u32>,
    /// Experts in host memory, instead of the configuration's.
    pub experts: Option<HostExperts>,
    /// Whether the device computes large steps with weights of host memory; yes unless set.
    pub op_offload: Option<bool>,
}

/// Which layers keep their experts in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostExperts {
    /// All.
    All,
    /// The first so many; 0 is none.
    First(u32),
}

/// All workers of one kind: a comma-separated list of [`WorkerSpec`]s.
///
/// ```
/// use eldr::engine::{HostExperts, Placed, WorkerList, WorkerSpec};
///
/// let list: WorkerList = "2@cuda:0,1@cuda:1[cpu-moe]".parse()?;
/// assert_eq!(list.devices().collect::<Vec<_>>(), [Some("cuda:0"), Some("cuda:0"), Some("cuda:1")]);
/// let spec = WorkerSpec { n: 1, device: Some("cuda:1".to_owned()), experts: Some(HostExperts::All), ..WorkerSpec::default() };
/// assert_eq!(list.0[1], spec);
/// let last: Placed<'_> = list.placed().last().expect("three workers");
/// assert_eq!((last.spec, last.index, last.cpus()), (&spec, 0, None));
/// # Ok::<(), eldr::EngineError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct WorkerList(pub Vec<WorkerSpec>);

/// Where one worker goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed<'a> {
    /// What is set for it and its like.
    pub spec: &'a WorkerSpec,
    /// Its number among them.
    pub index: u32,
}

impl WorkerSpec {
    /// The devices it names, one by one; none for the best one and for `all`.
    pub fn device_names(&self) -> impl Iterator<Item = &str> {
        self.device.iter().filter(|device| !split::is_all(device)).flat_map(|device| split::names(device))
    }
}

impl Placed<'_> {
    /// The processors that are its alone.
    pub fn cpus(&self) -> Option<CpuSet> {
        let parts = self.spec.cpus.as_ref()?.split(self.spec.n as usize)?;
        parts.into_iter().nth(self.index as usize)
    }
}

impl WorkerList {
    /// `n` workers on the best device.
    pub fn best(n: u32) -> Self {
        Self(vec![WorkerSpec { n, ..WorkerSpec::default() }])
    }

    /// The first worker alone, on its own processors.
    #[must_use]
    pub fn first(&self) -> Self {
        let first = self.placed().next();
        Self(first.map(|placed| WorkerSpec { n: 1, cpus: placed.cpus(), ..placed.spec.clone() }).into_iter().collect())
    }

    /// Workers in all.
    pub fn n_workers(&self) -> usize {
        self.0.iter().map(|spec| spec.n as usize).sum()
    }

    /// What each worker's entry names as its device, in order.
    pub fn devices(&self) -> impl Iterator<Item = Option<&str>> {
        self.placed().map(|placed| placed.spec.device.as_deref())
    }

    /// Each worker, in order.
    pub fn placed(&self) -> impl Iterator<Item = Placed<'_>> {
        self.0.iter().flat_map(|spec| (0..spec.n).map(move |index| Placed { spec, index }))
    }
}

/// Processors that two entries both claim, in a sentence each.
pub(super) fn overlap(prefill: &WorkerList, decode: &WorkerList) -> Vec<String> {
    let specs: Vec<&WorkerSpec> = prefill.0.iter().chain(&decode.0).filter(|spec| spec.cpus.is_some()).collect();
    let mut problems = Vec::new();
    for (at, one) in specs.iter().enumerate() {
        for other in &specs[at + 1..] {
            let (Some(a), Some(b)) = (&one.cpus, &other.cpus) else { continue };
            let both = a.common(b);
            if !both.is_empty() {
                problems.push(format!(
                    "'{one}' and '{other}' both claim processor {both}: give every worker processors of its own"
                ));
            }
        }
    }
    problems
}

/// Most workers of one kind: more is a typing error.
pub(super) const MAX_WORKERS: u32 = 1024;

impl FromStr for WorkerList {
    type Err = EngineError;

    fn from_str(list: &str) -> Result<Self, EngineError> {
        let specs = outside_brackets(list).map(|text| {
            parse(text.trim()).map_err(|why| {
                let (text, all) = (shown(text.trim()), shown(list.trim()));
                let of = if text == all { String::new() } else { format!(" in the workers '{all}'") };
                EngineError::Config(format!("'{text}'{of} {why}"))
            })
        });
        Ok(Self(specs.collect::<Result<_, _>>()?))
    }
}

/// The parts between commas that are in no brackets.
fn outside_brackets(list: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0i32;
    list.split(move |c| {
        depth += i32::from(c == '[') - i32::from(c == ']');
        c == ',' && depth <= 0
    })
}

const EXAMPLES: &str = "write 8, 8@cpu, 2@cuda:0,2@cuda:1, 1@cuda:0+cuda:1, 1@rpc:HOST:PORT or 2@cpu[0-7]";

fn parse(text: &str) -> Result<WorkerSpec, String> {
    let (count, place) = text.split_once('@').map_or((text, None), |(n, place)| (n, Some(place)));
    let n = match count.parse() {
        Ok(0) => return Err("asks for zero workers".to_owned()),
        Ok(n) if n > MAX_WORKERS => return Err(format!("asks for more than {MAX_WORKERS} workers")),
        Ok(n) => n,
        Err(_) => return Err(format!("does not start with a number of workers; {EXAMPLES}")),
    };
    let mut spec = WorkerSpec { n, ..WorkerSpec::default() };
    let Some(place) = place else { return Ok(spec) };
    let (device, settings) = match place.strip_suffix(']') {
        // An endpoint may hold an address in brackets itself, but does not end with one.
        Some(inside) => inside.rsplit_once('[').map(|(device, items)| (device, Some(items))),
        None => Some((place, None)),
    }
    .ok_or_else(|| format!("has a ] without a [; {EXAMPLES}"))?;
    let open = device.bytes().filter(|&b| b == b'[').count();
    if open != device.bytes().filter(|&b| b == b']').count() {
        return Err(format!("has a bracket that is not closed; {EXAMPLES}"));
    }
    if device.is_empty() {
        return Err(format!("names no device after the @; {EXAMPLES}"));
    }
    spec.device = Some(split::names(device).collect::<Vec<_>>().join("+"));
    let mut named = Vec::new();
    for item in settings.into_iter().flat_map(|items| items.split(',')) {
        let name = item.split('=').next().unwrap_or_default().trim();
        if named.contains(&name) {
            return Err(format!("sets {} twice; set it once", shown(name)));
        }
        // Processors are a list.
        named.extend(Some(name).filter(|name| !name.starts_with(|c: char| c.is_ascii_digit())));
        set(&mut spec, item.trim())?;
    }
    split::check(device, &spec.split)?;
    let is_cpu = device.eq_ignore_ascii_case("cpu");
    if let Some(cpus) = &spec.cpus {
        if !is_cpu {
            return Err(format!("pins workers of {} to processors, which only cpu workers are", shown(device)));
        }
        if cpus.len() < n as usize {
            return Err(format!("has {} processors for {n} workers: give each at least one", cpus.len()));
        }
        let each = cpus.len() as u32 / n;
        if spec.n_threads.is_some_and(|threads| threads > each) {
            return Err(format!("asks for more threads than the {each} processors of a worker"));
        }
    }
    if is_cpu && (spec.n_gpu_layers.is_some() || spec.experts.is_some() || spec.op_offload.is_some()) {
        return Err("moves weights between the host and a device, but cpu is the host".to_owned());
    }
    Ok(spec)
}

/// What can be said in the brackets after a device, beside processors.
const SETTINGS: &str = "threads=N, batch=N, split=N:N, n-gpu-layers=N, cpu-moe, n-cpu-moe=N or op-offload=on|off";

fn set(spec: &mut WorkerSpec, item: &str) -> Result<(), String> {
    if item.starts_with(|c: char| c.is_ascii_digit()) {
        let more: CpuSet = item.parse().map_err(|why| format!("names wrong processors: {why}"))?;
        let all = spec.cpus.iter().flat_map(|cpus| cpus.cpus().to_vec()).chain(more.cpus().iter().copied());
        spec.cpus = Some(CpuSet::new(all));
        return Ok(());
    }
    let (name, value) = item.split_once('=').map_or((item, None), |(name, value)| (name.trim(), Some(value.trim())));
    let number = |least: u32| match value.and_then(|value| value.parse::<u32>().ok()) {
        Some(n) if n >= least => Ok(n),
        _ => Err(format!("sets {name} to no whole number of at least {least}; write {name}=4")),
    };
    match (name, value) {
        ("split", _) => spec.split = split::shares(value.unwrap_or_default())?,
        ("split-mode" | "tensor-split", _) => {
            return Err(format!(
                "sets {name}, but models are divided by layers, and shares have a colon between: write split=3:1 instead"
            ));
        }
        ("threads", _) => spec.n_threads = Some(number(1)?),
        ("batch", _) => spec.n_batch = Some(number(1)?),
        ("n-gpu-layers", _) => spec.n_gpu_layers = Some(number(0)?),
        ("n-cpu-moe", _) => spec.experts = Some(HostExperts::First(number(0)?)),
        ("cpu-moe", None) => spec.experts = Some(HostExperts::All),
        ("op-offload", Some("on" | "off")) => spec.op_offload = Some(value == Some("on")),
        ("slots" | "ctx" | "chunk" | "kv-type" | "flash-attn", _) => {
            return Err(format!(
                "sets {name} for some workers, but sequences move between workers only where all have the same: set \
                 --{name} instead"
            ));
        }
        _ => return Err(format!("has '{}' in its brackets; there go processors, {SETTINGS}", shown(item))),
    }
    Ok(())
}

impl fmt::Display for WorkerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.n)?;
        let Some(device) = &self.device else { return Ok(()) };
        write!(f, "@{device}")?;
        let items = [
            self.cpus.as_ref().map(CpuSet::to_string),
            (!self.split.is_empty()).then(|| {
                let shares: Vec<String> = self.split.iter().map(u32::to_string).collect();
                format!("split={}", shares.join(":"))
            }),
            self.n_threads.map(|n| format!("threads={n}")),
            self.n_batch.map(|n| format!("batch={n}")),
            self.n_gpu_layers.map(|n| format!("n-gpu-layers={n}")),
            self.experts.map(|experts| match experts {
                HostExperts::All => "cpu-moe".to_owned(),
                HostExperts::First(n) => format!("n-cpu-moe={n}"),
            }),
            self.op_offload.map(|on| format!("op-offload={}", if on { "on" } else { "off" })),
        ];
        let items: Vec<String> = items.into_iter().flatten().collect();
        if items.is_empty() { Ok(()) } else { write!(f, "[{}]", items.join(",")) }
    }
}

impl fmt::Display for WorkerList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, spec) in self.0.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(f, "{comma}{spec}")?;
        }
        Ok(())
    }
}

impl TryFrom<String> for WorkerList {
    type Error = EngineError;

    fn try_from(list: String) -> Result<Self, EngineError> {
        list.parse()
    }
}

impl From<WorkerList> for String {
    fn from(list: WorkerList) -> Self {
        list.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_lists_read_back_as_written() {
        for list in [
            "8",
            "8@cpu",
            "2@cuda:0,2@cuda:1",
            "1@RPC0,3",
            "2@cuda:0,1@rpc:10.0.0.2:50052,2@cpu[0-7]",
            "1@cpu[0-3,8,threads=2,batch=64],1@rpc:[::1]:5000",
            "1@cuda:0[threads=2,n-gpu-layers=9,cpu-moe,op-offload=off],1@cuda:1[n-cpu-moe=3]",
            "2@cuda:0+cuda:1[split=3:1,n-gpu-layers=9],1@rpc:[::1]:5000+rpc:[::1]:5001,1@all[split=1:2:3]",
        ] {
            assert_eq!(list.parse::<WorkerList>().expect("valid").to_string(), list);
        }
        let list: WorkerList = "2@cuda:0, 1@cpu".parse().expect("valid");
        assert_eq!(list.n_workers(), 3);
        assert_eq!(list.devices().collect::<Vec<_>>(), [Some("cuda:0"), Some("cuda:0"), Some("cpu")]);
    }

    #[test]
    fn the_devices_of_an_entry_are_named_one_by_one() {
        let list: WorkerList = "2@cuda:0 + rpc:h:5000[split=3:1],1@ALL,1".parse().expect("valid");
        let names: Vec<Vec<&str>> = list.0.iter().map(|spec| spec.device_names().collect()).collect();
        assert_eq!(names, [vec!["cuda:0", "rpc:h:5000"], vec![], vec![]]);
        assert_eq!(list.0[0].split, [3, 1]);
        assert_eq!(list.devices().next(), Some(Some("cuda:0+rpc:h:5000")));
    }

    #[test]
    fn processors_are_divided_among_the_workers_of_an_entry() {
        let list: WorkerList = "1@cpu,3@cpu[0-6]".parse().expect("valid");
        let cpus: Vec<String> = list.placed().map(|w| w.cpus().unwrap_or_default().to_string()).collect();
        assert_eq!(cpus, ["", "0-1", "2-3", "4-6"]);
        let alone: WorkerList = "3@cpu[0-6]".parse().expect("valid");
        assert_eq!(alone.first().to_string(), "1@cpu[0-1]");
    }

    #[test]
    fn a_wrong_worker_list_says_what_is_wrong() {
        for (list, want) in [
            ("", "does not start with a number"),
            ("0", "zero workers"),
            ("two@cpu", "does not start with a number"),
            ("2@", "names no device"),
            ("1,,2", "does not start with a number"),
            ("99999", "more than 1024"),
            ("-1@cpu", "does not start with a number"),
            ("2@cpu[0-7", "not closed"),
            ("2@cpu0-7]", "] without a ["),
            ("2@[0-7]", "names no device"),
            ("2@cpu[]", "has '' in its brackets"),
            ("2@cpu[0]", "has 1 processors for 2 workers"),
            ("2@cpu[7-3]", "runs backwards"),
            ("2@cuda:0[0-3]", "only cpu workers"),
            ("2@cpu[0-3,threads=3]", "more threads than the 2 processors"),
            ("2@cpu[threads=1,threads=2]", "sets threads twice"),
            ("1@cuda:0+cuda:1[split=1:1,split=2:1]", "sets split twice"),
            ("2@cpu[threads=0]", "sets threads to no whole number"),
            ("2@cpu[thread=1]", "there go processors, threads=N"),
            ("2@cpu[slots=4]", "set --slots instead"),
            ("2@cpu[cpu-moe]", "cpu is the host"),
            ("2@cuda:0[op-offload=perhaps]", "op-offload=on|off"),
            ("1@cuda:0+cuda:0", "names cuda:0 twice"),
            ("1@cpu[0-3]+cpu", "one device"),
            ("1@cuda:0+cpu", "leave the host the first layers with n-gpu-layers=N"),
            ("1@cuda:0+cuda:1[split=3]", "gives 1 share to 2 devices"),
            ("1@cuda:0+cuda:1[split=3:0]", "share of 0"),
            ("1@cuda:0+cuda:1[split]", "write split=3:1"),
            ("1@cuda:0[split=3:1]", "names one"),
            ("1@cuda:0+cuda:1[split-mode=row]", "divided by layers"),
            ("1@cuda:0+cuda:1[0-3]", "only cpu workers"),
        ] {
            let error = list.parse::<WorkerList>().expect_err(list).to_string();
            assert!(error.contains(want), "{list}: {error}");
        }
    }

    // Symptom: "'2@cpu[9-1]' in the workers '2@cpu[9-1]' '9-1' runs backwards".
    #[test]
    fn a_wrong_entry_is_named_once() {
        let said = |list: &str| list.parse::<WorkerList>().expect_err(list).to_string();
        assert_eq!(said("2@cpu[9-1]"), "'2@cpu[9-1]' names wrong processors: '9-1' runs backwards; write 1-9");
        assert_eq!(said("1,0@cpu"), "'0@cpu' in the workers '1,0@cpu' asks for zero workers");
    }

    #[test]
    fn two_entries_that_claim_one_processor_are_told() {
        let list = |text: &str| text.parse::<WorkerList>().expect("valid");
        assert!(overlap(&list("1@cpu[0]"), &list("2@cpu[1-2],4")).is_empty());
        let problems = overlap(&list("1@cpu[0-1]"), &list("2@cpu[1-2],1@cpu[2]"));
        assert_eq!(problems.len(), 2);
        assert!(problems[0].contains("'1@cpu[0-1]' and '2@cpu[1-2]' both claim processor 1"), "{}", problems[0]);
    }
}
