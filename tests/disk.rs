//! Prefixes in a folder, whatever happens to it: processes killed while they write, a disk that is full, a folder that can
//! not be written, two processes at once, files that are torn, damaged, old or for something else. What is loaded is
//! always exactly what was stored, and nothing stops.
#![allow(clippy::unwrap_used)]

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use eldr::{
    engine::{DiskTier, EngineError},
    kv::ChunkCounts,
    schedule::{PrefixStore, SeqState, StoredPrefix},
    types::Token,
};

const N_EXPERT: u32 = 4;
const BLOCK: u32 = 4;

fn settings(model: &str) -> Vec<(String, String)> {
    vec![("model".to_owned(), model.to_owned()), ("chunk".to_owned(), "8".to_owned())]
}

fn open(dir: &Path, max_bytes: u64) -> DiskTier {
    let mut tier = DiskTier::open(dir, settings("m"), max_bytes).unwrap();
    tier.closing();
    tier
}

fn tokens(seed: u32, n: usize) -> Vec<Token> {
    (0..n).map(|i| Token::try_from((seed as usize * 31 + i * i) % 1000).unwrap()).collect()
}

/// A prefix all of whose bytes follow from its tokens.
fn prefix(seed: u32, n_tokens: usize, n_state_bytes: usize) -> StoredPrefix {
    let tokens = tokens(seed, n_tokens);
    let n = u32::try_from(n_tokens).unwrap();
    let layers: Arc<[u32]> = Arc::from([1, 2]);
    let mut counts = ChunkCounts::new(&layers, N_EXPERT, BLOCK, 0, n, 0);
    for (index, token) in tokens.iter().enumerate() {
        layers.iter().for_each(|&layer| counts.add(layer, index, &[token.cast_unsigned() % N_EXPERT]));
    }
    let bytes = (0..n_state_bytes).map(|i| u8::try_from((seed as usize + i * 7) % 251).unwrap()).collect();
    StoredPrefix { tokens, state: SeqState { n_tokens: n, bytes }, counts: Some(counts), whole: false }
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(120), "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Stores a prefix and waits until that has worked or not.
fn store(tier: &mut DiskTier, prefix: StoredPrefix) {
    let n_ended = |tier: &DiskTier| tier.stats().n_written + tier.stats().n_failed;
    let before = n_ended(tier);
    tier.put(prefix);
    wait_for("a write", || n_ended(tier) > before);
}

/// What is stored for a prompt, compared with what must be.
fn load(tier: &mut DiskTier, seed: u32, n_tokens: usize, n_state_bytes: usize) -> Option<()> {
    let want = prefix(seed, n_tokens, n_state_bytes);
    let found = tier.find(&want.tokens, &[1, 2])?;
    assert_eq!(found.n_common as usize, n_tokens);
    let got = tier.load(&found)?;
    assert_eq!((&got.tokens, &got.state, &got.counts), (&want.tokens, &want.state, &want.counts));
    Some(())
}

fn files(dir: &Path, suffix: &str) -> Vec<PathBuf> {
    let all = fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
    let mut found: Vec<_> = all.filter(|path| path.to_str().unwrap().ends_with(suffix)).collect();
    found.sort();
    found
}

const CHILD: &str = "ELDR_TEST_DISK_CHILD";

/// This test program once more, doing what [`in_another_process`] does for `what`.
fn child(what: &str, dir: &Path, limit_kib: Option<u32>) -> Child {
    let me = env::current_exe().unwrap();
    let args = ["in_another_process", "--exact", "--nocapture", "--test-threads=1"];
    let mut command = match limit_kib {
        None => Command::new(me),
        // A file that gets too long is an error then, as on a full disk, and no signal.
        Some(kib) => {
            let mut shell = Command::new("bash");
            shell.arg("-c").arg(format!("trap '' XFSZ; ulimit -f {kib}; exec \"$0\" \"$@\"")).arg(me);
            shell
        }
    };
    command.args(args).env(CHILD, format!("{what}:{}", dir.display()));
    command.stdout(Stdio::null()).spawn().unwrap()
}

#[test]
fn in_another_process() {
    let Ok(job) = env::var(CHILD) else { return };
    let (what, dir) = job.split_once(':').unwrap();
    let dir = Path::new(dir);
    match what {
        "write for ever" => {
            let mut tier = open(dir, 3 << 20);
            for seed in std::process::id().. {
                tier.put(prefix(seed, 40, 200_000));
            }
        }
        "write and read" => {
            let mut tier = open(dir, 600_000);
            for round in 0..60 {
                tier.put(prefix(round % 9, 40, 100_000));
                // It may be gone: the other process needs room too.
                let _ = load(&mut tier, (round * 5) % 9, 40, 100_000);
            }
            assert_eq!((tier.stats().n_failed, tier.stats().n_refused), (0, 0), "{:?}", tier.stats());
        }
        "hit the limit" => a_disk_without_room(dir),
        other => panic!("{other}"),
    }
}

/// Room for a file of 10,000 bytes and not for one of 900,000.
fn a_disk_without_room(dir: &Path) {
    let mut tier = open(dir, 1 << 30);
    store(&mut tier, prefix(1, 40, 10_000));
    store(&mut tier, prefix(2, 40, 900_000));
    let stats = tier.stats();
    assert_eq!((stats.n_written, stats.n_failed), (1, 1), "{stats:?}");
    let problem = stats.problem.unwrap();
    assert!(problem.contains("takes no more prefixes for now") && problem.contains("serving goes on"), "{problem}");
    assert!(files(dir, ".part").is_empty(), "nothing half written is left");
    store(&mut tier, prefix(3, 40, 9_000));
    assert_eq!(load(&mut tier, 1, 40, 10_000), Some(()));
    assert_eq!(load(&mut tier, 2, 40, 900_000), None);
    assert_eq!(load(&mut tier, 3, 40, 9_000), Some(()));
}

#[test]
fn what_was_stored_is_there_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("made/on/the/way");
    let mut tier = open(&path, 1 << 20);
    (0..6).for_each(|seed| tier.put(prefix(seed, 30, 5_000)));
    tier.flush();
    assert_eq!((tier.stats().n_written, tier.stats().n_skipped), (6, 0));
    let mut tier = open(&path, 1 << 20);
    assert_eq!((tier.stats().n_files, tier.stats().n_refused), (6, 0));
    assert!((0..6).all(|seed| load(&mut tier, seed, 30, 5_000).is_some()));
    assert!(tier.has(&tokens(3, 12), &[2]) && !tier.has(&tokens(3, 12), &[5]) && !tier.has(&tokens(7, 12), &[]));
    let mut branch = tokens(4, 20);
    branch.push(-1);
    let found = tier.find(&branch, &[1]).unwrap();
    assert_eq!((found.n_common, found.n_tokens), (20, 30));
    assert!(tier.find(&branch, &[3]).is_none(), "its picks are not known");
    store(&mut tier, prefix(4, 34, 5_000));
    assert_eq!(tier.stats().n_files, 6, "the longer one stands for the shorter one");
}

#[test]
fn a_process_killed_while_it_writes_leaves_nothing_that_is_loaded_or_stays() {
    let dir = tempfile::tempdir().unwrap();
    for _ in 0..4 {
        let mut writer = child("write for ever", dir.path(), None);
        wait_for("files, and one in the making", || {
            files(dir.path(), ".eldrkv").len() > 3 && !files(dir.path(), ".part").is_empty()
        });
        writer.kill().unwrap();
        writer.wait().unwrap();
        let mut tier = open(dir.path(), 3 << 20);
        assert!(files(dir.path(), ".part").is_empty(), "what was half written is gone");
        let stats = tier.stats();
        assert!(stats.n_refused == 0 && stats.n_files > 3 && stats.n_bytes <= 3 << 20, "{stats:?}");
        for path in files(dir.path(), ".eldrkv") {
            assert_eq!(load(&mut tier, seed_of(&path), 40, 200_000), Some(()), "{}", path.display());
        }
    }
}

/// The seed of a file of [`prefix`]: its state begins with it, modulo 251; its tokens tell which.
fn seed_of(path: &Path) -> u32 {
    let bytes = fs::read(path).unwrap();
    let header = u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize;
    let first = Token::from_le_bytes(bytes[16 + header..20 + header].try_into().unwrap());
    let state = bytes[bytes.len() - 32 - 200_000];
    // 31 * seed = first modulo 1000, and seed = state modulo 251.
    (0..251_000).find(|seed| (seed * 31) % 1000 == first.cast_unsigned() && seed % 251 == u32::from(state)).unwrap()
}

#[test]
fn two_processes_share_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let both = [(); 2].map(|()| child("write and read", dir.path(), None));
    for mut one in both {
        assert!(one.wait().unwrap().success());
    }
    let mut tier = open(dir.path(), 600_000);
    let stats = tier.stats();
    assert!(stats.n_files >= 4 && stats.n_refused == 0, "{stats:?}");
    // Each kept to the budget as it saw the folder before its last file.
    assert!(stats.n_bytes <= 600_000 + 101_000, "{stats:?}");
    let n_loaded = (0..9).filter_map(|seed| load(&mut tier, seed, 40, 100_000)).count();
    assert_eq!(n_loaded as u64, stats.n_files);
}

#[test]
fn a_file_that_can_not_be_written_to_its_end_is_told_and_serving_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    assert!(child("hit the limit", dir.path(), Some(100)).wait().unwrap().success());
}

/// A folder of its own file system, unmounted when dropped; none without the right to mount.
struct Mounted(tempfile::TempDir);

impl Mounted {
    fn new(options: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(dir.path()).stderr(Stdio::null());
        mount.status().is_ok_and(|status| status.success()).then(|| Self(dir))
    }

    fn remount(&self, options: &str) {
        let mut mount = Command::new("mount");
        assert!(mount.args(["-o", options]).arg(self.0.path()).status().unwrap().success());
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_is_told_and_serving_goes_on() {
    let Some(disk) = Mounted::new("size=128k") else { return };
    a_disk_without_room(disk.0.path());
}

#[test]
fn a_folder_that_can_not_be_written_is_read() {
    let Some(disk) = Mounted::new("size=1m") else { return };
    let dir = disk.0.path();
    store(&mut open(dir, 1 << 20), prefix(1, 40, 10_000));
    disk.remount("remount,ro");
    let mut tier = open(dir, 1 << 20);
    let problem = tier.stats().problem.unwrap();
    assert!(problem.contains("can not be written") && problem.contains("none are added"), "{problem}");
    assert_eq!(load(&mut tier, 1, 40, 10_000), Some(()));
    tier.put(prefix(2, 40, 10_000));
    assert!(tier.has(&tokens(2, 40), &[1]), "nothing is copied out in vain");
    assert_eq!(tier.stats().n_files, 1);
    assert!(DiskTier::check(dir).is_ok(), "what is there can be read");
}

/// Nobody can make a file there, not even the administrator.
#[cfg(target_os = "linux")]
#[test]
fn a_folder_where_no_file_can_be_made_is_told() {
    let tier = open(Path::new("/proc/self"), 1 << 20);
    let stats = tier.stats();
    assert!(stats.problem.as_ref().is_some_and(|problem| problem.contains("can not be written")), "{stats:?}");
    let tier = open(Path::new("/proc/self/no/such/folder"), 1 << 20);
    assert!(tier.stats().problem.is_some(), "{:?}", tier.stats());
}

// Symptom: `--cache-dir /proc/x` was found out when the model was loaded and the first prefix was to be written.
#[cfg(target_os = "linux")]
#[test]
fn a_folder_that_would_be_of_no_use_is_found_before_it_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    assert!(DiskTier::check(&dir.path().join("new/deep")).is_ok());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
    for path in ["/proc/eldr/x", "/proc/self", "/proc/version"] {
        let error = DiskTier::check(Path::new(path)).unwrap_err().to_string();
        assert!(error.contains(path), "{error}");
    }
}

#[test]
fn what_is_no_folder_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    match DiskTier::open(file.path(), settings("m"), 1) {
        Err(EngineError::Config(why)) => assert!(why.contains("is not a folder"), "{why}"),
        other => panic!("{:?}", other.err()),
    }
}

#[test]
fn torn_damaged_old_and_foreign_files_are_left_alone_and_never_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let mut tier = open(dir.path(), 1 << 20);
    (1..=5).for_each(|seed| store(&mut tier, prefix(seed, 30, 2_000)));
    drop(tier);
    let all = files(dir.path(), ".eldrkv");
    let by_seed = |want: u32| {
        all.iter().find(|path| {
            fs::read(path).unwrap()[..].windows(120).any(|bytes| {
                *bytes == *tokens(want, 30).iter().flat_map(|token| token.to_le_bytes()).collect::<Vec<u8>>()
            })
        })
    };
    let change = |seed: u32, change: &dyn Fn(&mut Vec<u8>)| {
        let path = by_seed(seed).unwrap();
        let mut bytes = fs::read(path).unwrap();
        change(&mut bytes);
        fs::write(path, bytes).unwrap();
    };
    change(2, &|bytes| bytes.truncate(1_000));
    change(3, &|bytes| bytes[8] = 200);
    change(4, &|bytes| {
        let at = bytes.len() - 500;
        bytes[at] ^= 1;
    });
    fs::write(dir.path().join("notes.eldrkv"), "something else").unwrap();
    fs::write(dir.path().join("notes.txt"), "not ours at all").unwrap();
    store(&mut DiskTier::open(dir.path(), settings("another"), 1 << 20).unwrap(), prefix(6, 30, 2_000));

    let mut tier = open(dir.path(), 1 << 20);
    assert_eq!((tier.stats().n_files, tier.stats().n_refused), (3, 4), "torn, old, another program's, another model's");
    let loaded: Vec<u32> = (1..=6).filter(|&seed| load(&mut tier, seed, 30, 2_000).is_some()).collect();
    assert_eq!(loaded, [1, 5]);
    assert_eq!(tier.stats().n_refused, 5, "the damaged one shows when it is read");
    assert!(tier.find(&tokens(4, 30), &[]).is_none(), "and is not found again");
    store(&mut tier, prefix(4, 30, 2_000));
    assert_eq!(load(&mut tier, 4, 30, 2_000), Some(()), "a good one takes its name");
    assert!(dir.path().join("notes.eldrkv").exists() && dir.path().join("notes.txt").exists());
    let mut other = DiskTier::open(dir.path(), settings("another"), 1 << 20).unwrap();
    assert_eq!(load(&mut other, 6, 30, 2_000), Some(()));
}

#[test]
fn what_was_not_used_for_longest_makes_room() {
    let dir = tempfile::tempdir().unwrap();
    let mut tier = open(dir.path(), 40_000);
    for (seed, age) in [(1, 30), (2, 20), (3, 10)] {
        let known = files(dir.path(), ".eldrkv");
        store(&mut tier, prefix(seed, 30, 10_000));
        let new = files(dir.path(), ".eldrkv").into_iter().find(|path| !known.contains(path)).unwrap();
        let time = SystemTime::now() - Duration::from_secs(age);
        fs::File::options().write(true).open(new).unwrap().set_modified(time).unwrap();
    }
    assert_eq!(load(&mut tier, 1, 30, 10_000), Some(()), "used just now");
    store(&mut tier, prefix(4, 30, 10_000));
    let there: Vec<u32> = (1..=4).filter(|&seed| tier.has(&tokens(seed, 30), &[1, 2])).collect();
    assert_eq!(there, [1, 3, 4]);
    tier.put(prefix(5, 30, 50_000));
    drop(tier);
    let tier = open(dir.path(), 40_000);
    assert_eq!((tier.stats().n_files, tier.stats().n_removed), (3, 0), "larger than all the room there is");
    drop(tier);
    let mut tier = open(dir.path(), 15_000);
    store(&mut tier, prefix(6, 30, 1_000));
    assert_eq!(tier.stats().n_files, 2, "a smaller budget is kept to");
}

// Symptom: a folder of 32 MiB stayed so under `--cache-disk 1` until something new was written.
#[test]
fn a_smaller_budget_is_kept_to_when_the_folder_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    let mut tier = open(dir.path(), 1 << 20);
    for (seed, age) in [(1, 10), (2, 30), (3, 20)] {
        let known = files(dir.path(), ".eldrkv");
        store(&mut tier, prefix(seed, 30, 10_000));
        let new = files(dir.path(), ".eldrkv").into_iter().find(|path| !known.contains(path)).unwrap();
        let time = SystemTime::now() - Duration::from_secs(age);
        fs::File::options().write(true).open(new).unwrap().set_modified(time).unwrap();
    }
    store(&mut DiskTier::open(dir.path(), settings("another"), 1 << 20).unwrap(), prefix(4, 30, 10_000));
    drop(tier);
    let mut tier = open(dir.path(), 15_000);
    assert_eq!((tier.stats().n_files, tier.stats().n_removed), (1, 2));
    assert_eq!(load(&mut tier, 1, 30, 10_000), Some(()), "the one that was used last stays");
    assert_eq!(files(dir.path(), ".eldrkv").len(), 2, "another model's is left alone");
}
