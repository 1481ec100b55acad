//! Traces on disk: read record by record, or written whole.
//!
//! Never hands out a record whose checksum differs.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufReader, Read},
    path::{Path, PathBuf},
};

use super::{EngineError, OutputError, replace_file};
use crate::trace::{
    FRAME_HEAD, FrameHead, PREAMBLE, PromptKey, RecordSettings, Trace, TraceError, TraceHeader, TraceRequest,
    check_preamble, decode_header, decode_request, encode_header, encode_request, frame, preamble,
};

/// Why a trace was not read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceFileError {
    /// The file could not be read.
    #[error("cannot read trace `{}`: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file could not be written; the records before are whole.
    #[error("cannot write trace `{}`: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Nothing can be written there without a loss.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// The file is not a whole trace.
    #[error("cannot use `{}`: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: TraceError,
    },
    /// Another recording writes it.
    #[error("cannot write trace `{}`: another recording writes it now; wait for its end or choose another output", .0.display())]
    Busy(PathBuf),
    /// It was recorded otherwise.
    #[error(
        "cannot go on with trace `{}`: it was recorded with {what} {recorded}, now it would be {asked}; give the same \
         or another output",
        path.display()
    )]
    Differs {
        /// The file.
        path: PathBuf,
        /// The setting.
        what: &'static str,
        /// The trace's.
        recorded: String,
        /// This recording's.
        asked: String,
    },
}

impl TraceFileError {
    /// Whether another file or other settings would have worked.
    pub fn is_input(&self) -> bool {
        !matches!(self, Self::Write { .. } | Self::Busy(_))
    }
}

/// Reads a trace, verifying every record.
///
/// Errors: a file that is missing, no trace, of another version, cut off, damaged (the record is named), or with an id
/// twice.
pub fn read_trace(path: &Path) -> Result<Trace, EngineError> {
    let file = File::open(path).map_err(|source| TraceFileError::Read { path: path.into(), source })?;
    let mut reader = Reader::start(path, BufReader::new(&file))?;
    let mut requests = Vec::new();
    while let Some((request, _)) = reader.next()? {
        requests.push(request);
    }
    Ok(Trace { header: reader.header, requests })
}

/// How a trace was recorded.
pub fn read_trace_settings(path: &Path) -> Result<RecordSettings, EngineError> {
    let file = File::open(path).map_err(|source| TraceFileError::Read { path: path.into(), source })?;
    Ok(Reader::start(path, BufReader::new(&file))?.settings)
}

/// Writes a trace as [`replace_file`] does: after an error, what was there is as it was. `settings` say how it was
/// recorded, gates included.
pub fn write_trace(path: &Path, trace: &Trace, settings: &RecordSettings) -> Result<(), EngineError> {
    let wrong = |source| TraceFileError::Format { path: path.into(), source };
    let mut bytes = preamble().to_vec();
    bytes.extend(frame(0, &encode_header(&trace.header, settings).map_err(wrong)?));
    for (number, request) in (1..).zip(&trace.requests) {
        let content = encode_request(&trace.header, settings.gates, number, request, PromptKey::default());
        bytes.extend(frame(number, &content.map_err(wrong)?));
    }
    replace_file(path, &bytes).map_err(|source| TraceFileError::Write { path: path.into(), source })?;
    Ok(())
}

/// Records one after another.
pub(super) struct Reader<'a, R> {
    path: &'a Path,
    source: R,
    pub header: TraceHeader,
    pub settings: RecordSettings,
    /// Where the next record starts.
    pub at: u64,
    next: u32,
    first: BTreeMap<String, u32>,
}

impl<'a, R: Read> Reader<'a, R> {
    /// Reads up to the first record.
    pub fn start(path: &'a Path, mut source: R) -> Result<Self, TraceFileError> {
        let wrong = |source| TraceFileError::Format { path: path.into(), source };
        let start = take(&mut source, PREAMBLE).map_err(|source| TraceFileError::Read { path: path.into(), source })?;
        check_preamble(&start).map_err(wrong)?;
        let at = PREAMBLE as u64;
        let Some(content) = content(path, &mut source, 0, at)? else {
            return Err(wrong(TraceError::Torn { record: 0, at }));
        };
        let (header, settings) = decode_header(&content).map_err(wrong)?;
        let at = at + (FRAME_HEAD + content.len()) as u64;
        Ok(Self { path, source, header, settings, at, next: 1, first: BTreeMap::new() })
    }

    /// The next record; nothing at the end.
    pub fn next(&mut self) -> Result<Option<(TraceRequest, PromptKey)>, TraceFileError> {
        let number = self.next;
        let wrong = |source| TraceFileError::Format { path: self.path.into(), source };
        let Some(content) = content(self.path, &mut self.source, number, self.at)? else { return Ok(None) };
        let (request, key) = decode_request(&self.header, self.settings.gates, number, &content).map_err(wrong)?;
        if let Some(&first) = self.first.get(&request.id) {
            return Err(wrong(TraceError::DuplicateId { record: number, first, id: request.id }));
        }
        self.first.insert(request.id.clone(), number);
        self.at += (FRAME_HEAD + content.len()) as u64;
        self.next += 1;
        Ok(Some((request, key)))
    }
}

/// The content of record `number`, which starts at byte `at`; nothing at the end of the file.
fn content(path: &Path, source: &mut impl Read, number: u32, at: u64) -> Result<Option<Vec<u8>>, TraceFileError> {
    let wrong = |source| TraceFileError::Format { path: path.into(), source };
    let read = |source| TraceFileError::Read { path: path.into(), source };
    let head = take(source, FRAME_HEAD).map_err(read)?;
    if head.is_empty() {
        return Ok(None);
    }
    let torn = || wrong(TraceError::Torn { record: number, at });
    let head = FrameHead::parse(number, head.first_chunk().ok_or_else(torn)?).map_err(wrong)?;
    let content = take(source, head.length() as usize).map_err(read)?;
    if content.len() < head.length() as usize {
        return Err(torn());
    }
    head.verify(&content).map_err(wrong)?;
    Ok(Some(content))
}

/// `n` bytes, or fewer at the end.
fn take(source: &mut impl Read, n: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(n as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}
