use std::{fs, path::Path};

use crate::types::CpuSet;

/// The machine's processors and memory, as Linux describes them; elsewhere one node of as many processors as the process
/// may use.
///
/// ```
/// use eldr::engine::{Layout, NumaNode, Topology};
///
/// let machine = Topology::detect();
/// assert!(!machine.allowed.is_empty());
/// for NumaNode { id, cpus, .. } in &machine.nodes {
///     println!("node {id}: {} processors", cpus.len());
/// }
/// let Layout { prefill, decode, why } = machine.layout();
/// println!("--prefill {prefill} --decode {decode}: {why}");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// Processors this process may use.
    pub allowed: CpuSet,
    /// NUMA nodes that have processors of those, ascending.
    pub nodes: Vec<NumaNode>,
    /// The processors of each physical core, among those, by their first one.
    pub cores: Vec<CpuSet>,
}

/// Processors and the memory beside them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaNode {
    /// The system's number.
    pub id: u32,
    /// Its processors that this process may use.
    pub cpus: CpuSet,
    /// Memory, in bytes; none where it is not told.
    pub total_bytes: Option<u64>,
    /// Of that, unused now.
    pub free_bytes: Option<u64>,
}

/// Workers to ask for with `--prefill` and `--decode`, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// For `--prefill`.
    pub prefill: String,
    /// For `--decode`.
    pub decode: String,
    /// In a sentence.
    pub why: String,
}

impl Topology {
    /// This machine's.
    pub fn detect() -> Self {
        let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
        let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let allowed = allowed(&status).unwrap_or_else(|| CpuSet::new(0..n_cores as u32));
        Self::read(Path::new("/sys/devices/system"), allowed)
    }

    /// From a folder like `/sys/devices/system`, for a process that may use `allowed`.
    fn read(system: &Path, allowed: CpuSet) -> Self {
        let text = |path: String| fs::read_to_string(system.join(path)).ok();
        let set = |path: String| text(path)?.trim().parse::<CpuSet>().ok();
        let mut nodes: Vec<NumaNode> = set("node/online".to_owned())
            .iter()
            .flat_map(|nodes| nodes.cpus().to_vec())
            .filter_map(|id| {
                let cpus = set(format!("node/node{id}/cpulist"))?.common(&allowed);
                let memory = text(format!("node/node{id}/meminfo")).unwrap_or_default();
                let bytes = |name: &str| kilobytes(&memory, name);
                let (total_bytes, free_bytes) = (bytes("MemTotal:"), bytes("MemFree:"));
                (!cpus.is_empty()).then_some(NumaNode { id, cpus, total_bytes, free_bytes })
            })
            .collect();
        if nodes.is_empty() {
            nodes.push(NumaNode { id: 0, cpus: allowed.clone(), total_bytes: None, free_bytes: None });
        }
        let mut cores: Vec<CpuSet> = Vec::new();
        for &cpu in allowed.cpus() {
            if cores.iter().all(|core| !core.cpus().contains(&cpu)) {
                let siblings = set(format!("cpu/cpu{cpu}/topology/thread_siblings_list"));
                cores.push(siblings.unwrap_or_else(|| CpuSet::new([cpu])).common(&allowed));
            }
        }
        Self { allowed, nodes, cores }
    }

    /// The node that has all of these processors; none if they are spread.
    pub fn node_of(&self, cpus: &CpuSet) -> Option<u32> {
        self.nodes.iter().find(|node| cpus.without(&node.cpus).is_empty()).map(|node| node.id)
    }

    /// What is wrong with pinning workers to these processors, in a sentence.
    pub fn problem(&self, cpus: &CpuSet) -> Option<String> {
        let missing = cpus.without(&self.allowed);
        (!missing.is_empty()).then(|| {
            format!("this process may use processors {}, and {missing} is not among them: name others", self.allowed)
        })
    }

    /// One thread a physical core: a quarter of the first node's cores prefill, and every node has a decode worker on the
    /// rest of its own.
    pub fn layout(&self) -> Layout {
        let firsts = CpuSet::new(self.cores.iter().filter_map(|core| core.cpus().first().copied()));
        let mut per_node = self.nodes.iter().map(|node| node.cpus.common(&firsts)).collect::<Vec<_>>();
        per_node.retain(|cpus| !cpus.is_empty());
        let n_cores = firsts.len();
        if n_cores < 4 || per_node[0].len() < 2 {
            let why = format!("{n_cores} physical cores are too few to divide: leave the workers unpinned");
            return Layout { prefill: "1@cpu".to_owned(), decode: "2@cpu".to_owned(), why };
        }
        let first = &per_node[0];
        let n_prefill = (first.len() / 4).max(1);
        let prefill = CpuSet::new(first.cpus()[..n_prefill].iter().copied());
        per_node[0] = first.without(&prefill);
        let decode: Vec<String> = match per_node.as_slice() {
            // One node: two workers, so that there is something to route between.
            [only] => vec![format!("2@cpu[{only}]")],
            nodes => nodes.iter().map(|cpus| format!("1@cpu[{cpus}]")).collect(),
        };
        let why = format!(
            "{n_cores} physical cores on {} NUMA {}: a thread each, a quarter of the first node for prefill, decode \
             workers that keep to a node",
            self.nodes.len(),
            if self.nodes.len() == 1 { "node" } else { "nodes" }
        );
        Layout { prefill: format!("1@cpu[{prefill}]"), decode: decode.join(","), why }
    }
}

fn allowed(status: &str) -> Option<CpuSet> {
    status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim().parse().ok()
}

/// The bytes of a line such as `Node 0 MemTotal: 12 kB`.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.split_whitespace().any(|word| word == name))?;
    let (_, rest) = line.split_once(name)?;
    Some(rest.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two nodes of four cores with two threads each, as Linux numbers them.
    fn two_nodes() -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |path: String, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            fs::write(path, text).expect("written");
        };
        write("node/online".to_owned(), "0-1\n");
        write("node/node0/cpulist".to_owned(), "0-3,8-11\n");
        write("node/node1/cpulist".to_owned(), "4-7,12-15\n");
        write("node/node0/meminfo".to_owned(), "Node 0 MemTotal:  1000 kB\nNode 0 MemFree:  10 kB\n");
        for cpu in 0..16 {
            let first = cpu % 8;
            write(format!("cpu/cpu{cpu}/topology/thread_siblings_list"), &format!("{first},{}\n", first + 8));
        }
        folder
    }

    #[test]
    fn nodes_cores_and_a_layout_that_keeps_to_them() {
        let folder = two_nodes();
        let topology = Topology::read(folder.path(), CpuSet::new(0..16));
        assert_eq!(topology.cores.len(), 8);
        let node = &topology.nodes[0];
        assert_eq!(
            (node.cpus.to_string().as_str(), node.total_bytes, node.free_bytes),
            ("0-3,8-11", Some(1_024_000), Some(10_240))
        );
        assert_eq!(topology.node_of(&CpuSet::new([4, 12])), Some(1));
        assert_eq!(topology.node_of(&CpuSet::new([3, 4])), None);
        let layout = topology.layout();
        assert_eq!((layout.prefill.as_str(), layout.decode.as_str()), ("1@cpu[0]", "1@cpu[1-3],1@cpu[4-7]"));
        assert!(layout.why.contains("8 physical cores on 2 NUMA nodes"), "{}", layout.why);
    }

    #[test]
    fn processors_that_are_not_allowed_are_left_out_and_told() {
        let folder = two_nodes();
        let topology = Topology::read(folder.path(), CpuSet::new([0, 1, 8]));
        assert_eq!((topology.nodes.len(), topology.cores.len()), (1, 2));
        let problem = topology.problem(&CpuSet::new([1, 4])).expect("4 is not allowed");
        assert!(problem.contains("may use processors 0-1,8, and 4 is not"), "{problem}");
        assert!(topology.layout().why.contains("too few to divide"));
    }

    #[test]
    fn a_machine_that_tells_nothing_is_one_node() {
        let folder = tempfile::tempdir().expect("a folder");
        let topology = Topology::read(folder.path(), CpuSet::new(0..8));
        assert_eq!((topology.nodes.len(), topology.cores.len()), (1, 8));
        let layout = topology.layout();
        assert_eq!((layout.prefill.as_str(), layout.decode.as_str()), ("1@cpu[0-1]", "2@cpu[2-7]"));
    }

    #[test]
    fn this_machine_has_a_processor() {
        let topology = Topology::detect();
        assert!(!topology.allowed.is_empty() && !topology.nodes.is_empty() && !topology.cores.is_empty());
    }
}
