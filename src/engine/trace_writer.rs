//! A trace that grows by one record at a time, and goes on where a recording was killed.
//!
//! Never changes a record that is whole, and never lets two recordings write one file.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions, TryLockError},
    io::{self, BufReader, Read as _, Seek as _, Write as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use super::{EngineError, TraceFileError, check_output, trace_file::Reader};
use crate::trace::{
    PREAMBLE, PromptKey, RecordSettings, TraceError, TraceHeader, TraceRequest, check_preamble, encode_header,
    encode_request, frame, is_torn_preamble, preamble,
};

/// A record is in the file at once, and on the disk at the latest so much later: a killed recording loses no record, a
/// power cut a second's work.
const SYNC_AFTER: Duration = Duration::from_secs(1);

/// Checks, before the work, that a recording can write `path`: nothing but a trace, an empty file or a new one, and
/// none of `inputs`.
pub fn check_trace_output(path: &Path, inputs: &[&Path]) -> Result<(), EngineError> {
    let target = check_output(path, inputs).map_err(TraceFileError::from)?;
    let read = |source| TraceFileError::Read { path: path.into(), source };
    let mut start = Vec::new();
    match File::open(&target) {
        Ok(file) => file.take(PREAMBLE as u64).read_to_end(&mut start).map_err(read)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(read(error).into()),
    };
    if !is_torn_preamble(&start) {
        check_preamble(&start).map_err(|source| TraceFileError::Format { path: path.into(), source })?;
    }
    Ok(())
}

/// A trace that grows, locked against other recordings until it is dropped.
///
/// ```
/// # mod planted {
/// #     include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/planted_trace.rs"));
/// # }
///
/// use eldr::{
///     EngineError,
///     engine::{OutputError, TraceFileError, TraceWriter, check_output, read_trace},
///     trace::{PromptKey, RecordSettings},
/// };
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let trace = planted::trace(2);
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("a.trace");
/// for request in &trace.requests {
///     // Opened again, it goes on behind the requests that are whole.
///     let mut writer = TraceWriter::open(&path, &trace.header, &RecordSettings::default())?;
///     writer.append(request, PromptKey::new(&[1], 40, request.domain.as_deref()))?;
///     writer.sync()?;
/// }
/// assert_eq!(read_trace(&path)?, trace);
///
/// let missing = read_trace(&folder.path().join("none"));
/// assert!(matches!(missing, Err(EngineError::TraceFile(TraceFileError::Read { .. }))));
/// let clash = check_output(&path, &[&path]);
/// assert!(matches!(clash, Err(OutputError::IsInput { .. })), "an output is never an input");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TraceWriter {
    file: File,
    path: PathBuf,
    header: TraceHeader,
    gates: bool,
    n_bytes: u64,
    recorded: BTreeMap<String, PromptKey>,
    synced: Instant,
}

impl TraceWriter {
    /// Starts the trace `path`, or goes on with it: a record that is not whole, at its end, is cut off.
    ///
    /// Errors: a file that is no trace, a damaged record before the end, another model or other settings, another
    /// recording that writes it.
    pub fn open(path: &Path, header: &TraceHeader, settings: &RecordSettings) -> Result<Self, EngineError> {
        check_trace_output(path, &[])?;
        let write = |source| TraceFileError::Write { path: path.into(), source };
        let file = OpenOptions::new().read(true).append(true).create(true).open(path).map_err(write)?;
        match file.try_lock() {
            // Where the file system has no locks, nothing can be told.
            Ok(()) => {}
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {}
            Err(TryLockError::WouldBlock) => return Err(TraceFileError::Busy(path.into()).into()),
            Err(TryLockError::Error(error)) => return Err(write(error).into()),
        }
        let mut writer = Self {
            file,
            path: path.into(),
            header: header.clone(),
            gates: settings.gates,
            n_bytes: 0,
            recorded: BTreeMap::new(),
            synced: Instant::now(),
        };
        let start = writer.read_back(settings)?;
        writer.cut(writer.n_bytes).map_err(write)?;
        if start {
            let content = encode_header(header, settings);
            let content = content.map_err(|source| TraceFileError::Format { path: path.into(), source })?;
            writer.put(&[&preamble()[..], &frame(0, &content)].concat())?;
            writer.sync()?;
        }
        Ok(writer)
    }

    /// Requests in the file.
    pub fn n_recorded(&self) -> usize {
        self.recorded.len()
    }

    /// What was asked for the request `id`, if it is in the file.
    pub fn key(&self, id: &str) -> Option<PromptKey> {
        self.recorded.get(id).copied()
    }

    /// Adds a request. After an error the file is as it was.
    pub fn append(&mut self, request: &TraceRequest, key: PromptKey) -> Result<(), EngineError> {
        let number = self.recorded.len() as u32 + 1;
        let wrong = |source| TraceFileError::Format { path: self.path.clone(), source };
        if self.recorded.contains_key(&request.id) {
            let problem = format!("has the id `{}`, which is there already", request.id);
            return Err(wrong(TraceError::Content { record: number, problem }).into());
        }
        let content = encode_request(&self.header, self.gates, number, request, key).map_err(wrong)?;
        self.put(&frame(number, &content))?;
        self.recorded.insert(request.id.clone(), key);
        if self.synced.elapsed() >= SYNC_AFTER {
            self.sync()?;
        }
        Ok(())
    }

    /// Waits until every record is on the disk.
    pub fn sync(&mut self) -> Result<(), EngineError> {
        self.file.sync_data().map_err(|source| TraceFileError::Write { path: self.path.clone(), source })?;
        self.synced = Instant::now();
        Ok(())
    }

    /// Takes in the records that are there and leaves out one that is torn; whether the trace has to be started.
    fn read_back(&mut self, settings: &RecordSettings) -> Result<bool, TraceFileError> {
        let mut reader = match Reader::start(&self.path, BufReader::new(&self.file)) {
            Ok(reader) => reader,
            // Nothing was recorded before the first was killed.
            Err(TraceFileError::Format { source: TraceError::Empty | TraceError::Torn { .. }, .. }) => return Ok(true),
            Err(error) => return Err(error),
        };
        self.check_same(&reader.header, &reader.settings, settings)?;
        loop {
            self.n_bytes = reader.at;
            match reader.next() {
                Ok(Some((request, key))) => self.recorded.insert(request.id, key),
                Ok(None) | Err(TraceFileError::Format { source: TraceError::Torn { .. }, .. }) => return Ok(false),
                Err(error) => return Err(error),
            };
        }
    }

    fn check_same(
        &self,
        header: &TraceHeader,
        recorded: &RecordSettings,
        asked: &RecordSettings,
    ) -> Result<(), TraceFileError> {
        let difference = if (&header.fingerprint, &header.shape) != (&self.header.fingerprint, &self.header.shape) {
            Some(("the model", header.fingerprint.clone(), self.header.fingerprint.clone()))
        } else if header.n_block != self.header.n_block {
            Some(("--block", header.n_block.to_string(), self.header.n_block.to_string()))
        } else {
            recorded.difference(asked)
        };
        match difference {
            Some((what, recorded, asked)) => {
                Err(TraceFileError::Differs { path: self.path.clone(), what, recorded, asked })
            }
            None => Ok(()),
        }
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), TraceFileError> {
        if let Err(source) = self.file.write_all(bytes) {
            // The first error is the one to report; what is left of it is a torn record.
            let _ = self.cut(self.n_bytes);
            return Err(TraceFileError::Write { path: self.path.clone(), source });
        }
        self.n_bytes += bytes.len() as u64;
        Ok(())
    }

    fn cut(&mut self, n_bytes: u64) -> io::Result<()> {
        self.file.set_len(n_bytes)?;
        self.file.seek(io::SeekFrom::End(0)).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{
        engine::{read_trace, read_trace_settings, write_trace},
        trace::Trace,
        types::MoeShape,
    };

    fn header() -> TraceHeader {
        let shape = MoeShape { layers: vec![0, 1], n_layer: 2, n_expert: 3, n_expert_used: 1 };
        TraceHeader { shape, fingerprint: "planted".into(), n_block: 2 }
    }

    fn request(i: u16) -> TraceRequest {
        TraceRequest {
            id: format!("r{i}"),
            domain: i.is_multiple_of(2).then(|| "even".to_owned()),
            n_prompt: 3,
            blocks: vec![2, 0, 0, 0, 0, 1],
            picks: vec![i % 3, 2, 1, i % 3],
            gates: None,
        }
    }

    fn settings() -> RecordSettings {
        RecordSettings { max_tokens: 3, ..RecordSettings::default() }
    }

    fn key(i: u16) -> PromptKey {
        PromptKey::new(&[i.into()], 3, None)
    }

    fn open(path: &Path) -> Result<TraceWriter, String> {
        TraceWriter::open(path, &header(), &settings()).map_err(|error| error.to_string())
    }

    /// Records what is missing of `n` requests.
    fn record(path: &Path, n: u16) -> Result<usize, String> {
        let mut writer = open(path)?;
        let before = writer.n_recorded();
        for i in 0..n {
            match writer.key(&format!("r{i}")) {
                Some(known) => assert_eq!(known, key(i)),
                None => writer.append(&request(i), key(i)).map_err(|error| error.to_string())?,
            }
        }
        Ok(before)
    }

    fn refused(path: &Path) -> String {
        read_trace(path).expect_err("refused").to_string()
    }

    /// The bytes of a trace of `n` requests, and where each record starts, its end last.
    fn recorded(dir: &Path, n: u16) -> (Vec<u8>, Vec<usize>) {
        let path = dir.join("whole");
        let starts = (0..=n).map(|i| {
            assert_eq!(record(&path, i), Ok(usize::from(i.saturating_sub(1))));
            fs::metadata(&path).expect("there").len() as usize
        });
        let starts = [PREAMBLE].into_iter().chain(starts).collect();
        (fs::read(&path).expect("there"), starts)
    }

    #[test]
    fn what_is_recorded_or_written_is_read() {
        let dir = tempfile::tempdir().expect("a folder");
        let (bytes, _) = recorded(dir.path(), 3);
        let trace = Trace { header: header(), requests: (0..3).map(request).collect() };
        assert_eq!(read_trace(&dir.path().join("whole")).expect("a trace"), trace);
        let other = dir.path().join("other");
        write_trace(&other, &trace, &settings()).expect("written");
        assert_eq!(read_trace(&other).expect("a trace"), trace);
        assert_eq!(read_trace_settings(&other).expect("a trace"), settings());
        // The same but for what was asked, which a trace in memory does not know.
        assert_eq!(fs::read(&other).expect("there").len(), bytes.len());
        let gated = RecordSettings { gates: true, ..settings() };
        let error = write_trace(&other, &trace, &gated).expect_err("it has none").to_string();
        assert!(error.contains("record 1") && error.contains("lacks the gate's sums"), "{error}");
        assert_eq!(read_trace(&other).expect("as it was"), trace);
    }

    #[test]
    fn a_recording_killed_at_any_byte_goes_on_to_the_same_file() {
        let dir = tempfile::tempdir().expect("a folder");
        let (bytes, starts) = recorded(dir.path(), 3);
        let path = dir.path().join("cut");
        for cut in 0..=bytes.len() {
            fs::write(&path, &bytes[..cut]).expect("written");
            let n_whole = starts[2..].iter().filter(|&&end| end <= cut).count();
            if cut == 0 {
                assert!(refused(&path).contains("the file is empty"), "{}", refused(&path));
            } else if starts[1..].contains(&cut) {
                assert_eq!(read_trace(&path).expect("whole records").requests.len(), n_whole, "cut at {cut}");
            } else {
                let n = if cut < starts[1] { 0 } else { n_whole + 1 };
                assert!(refused(&path).contains(&format!("cut off in record {n}, at byte ")), "{}", refused(&path));
            }
            assert_eq!(record(&path, 3), Ok(n_whole), "cut at {cut}");
            assert!(fs::read(&path).expect("there") == bytes, "cut at {cut}");
        }
    }

    #[test]
    fn a_flipped_bit_is_found_its_record_named_and_nothing_cut_off() {
        let dir = tempfile::tempdir().expect("a folder");
        let (bytes, starts) = recorded(dir.path(), 3);
        let path = dir.path().join("damaged");
        // Each bit of a byte in turn.
        for bit in (0..bytes.len()).map(|byte| byte * 8 + byte % 8) {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &damaged).expect("written");
            let want = match starts.iter().rposition(|&start| start <= bit / 8) {
                Some(number) => format!("record {number} of the trace is damaged"),
                None if bit < 64 => "the file is not a trace".to_owned(),
                None => "but this eldr reads version 1".to_owned(),
            };
            assert!(refused(&path).contains(&want), "bit {bit}: {}", refused(&path));
            let error = record(&path, 3).expect_err("refused");
            assert!(error.contains(&want) && error.contains("damaged`"), "bit {bit}: {error}");
            assert!(fs::read(&path).expect("there") == damaged, "bit {bit}");
        }
    }

    #[test]
    fn other_settings_another_model_and_other_files_are_refused() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("t");
        record(&path, 1).expect("recorded");
        let before = fs::read(&path).expect("there");
        let refused = |header: TraceHeader, settings: RecordSettings| {
            TraceWriter::open(&path, &header, &settings).expect_err("refused").to_string()
        };
        let error = refused(TraceHeader { fingerprint: "other".into(), ..header() }, settings());
        assert!(error.contains("recorded with the model planted, now it would be other"), "{error}");
        let error = refused(TraceHeader { n_block: 16, ..header() }, settings());
        assert!(error.contains("with --block 2, now it would be 16"), "{error}");
        let error = refused(header(), RecordSettings { seed: 3, ..settings() });
        assert!(error.contains("with --seed 0, now it would be 3"), "{error}");
        assert_eq!(fs::read(&path).expect("there"), before);

        let prose = dir.path().join("prose");
        fs::write(&prose, "{\"id\":\"a\",\"prompt\":\"mine\"}").expect("written");
        let error = open(&prose).expect_err("refused");
        assert!(error.contains("prose") && error.contains("not a trace"), "{error}");
        let error = open(dir.path()).expect_err("refused");
        assert!(error.contains("it is a folder"), "{error}");
        assert_eq!(fs::read(&prose).expect("there"), b"{\"id\":\"a\",\"prompt\":\"mine\"}");
        let missing = read_trace(&dir.path().join("missing")).expect_err("refused").to_string();
        assert!(missing.contains("cannot read trace") && missing.contains("missing"), "{missing}");
    }

    #[test]
    fn two_recordings_do_not_write_one_file() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("t");
        let mut first = open(&path).expect("new");
        let error = open(&path).expect_err("refused");
        assert!(error.contains("another recording writes it"), "{error}");
        first.append(&request(0), key(0)).expect("recorded");
        assert!(first.append(&request(0), key(0)).is_err(), "an id twice");
        drop(first);
        assert_eq!(open(&path).expect("free again").n_recorded(), 1);
    }

    #[test]
    fn an_id_that_is_there_twice_is_named() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("t");
        let trace = Trace { header: header(), requests: vec![request(4), request(5), request(4)] };
        write_trace(&path, &trace, &settings()).expect("written");
        assert!(refused(&path).contains("records 1 and 3 of the trace both have the id `r4`"), "{}", refused(&path));
    }
}
