use crate::types::shown;

/// Why bytes are not a trace, or no whole one. Requests are numbered from 1, as their records are; record 0 is the
/// header.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// No bytes at all.
    #[error("the file is empty, not a trace: make one with `eldr record`")]
    Empty,
    /// Other bytes.
    #[error("the file is not a trace: make one with `eldr record`")]
    NotATrace,
    /// Another version of the format.
    #[error("the trace has format version {found}, but this eldr reads version {known}: record it again")]
    Version {
        /// The file's version.
        found: u32,
        /// The version this crate reads and writes.
        known: u32,
    },
    /// The file ends inside a record.
    #[error(
        "the trace is cut off in record {record}, at byte {at}: the `eldr record` command that made it goes on from there"
    )]
    Torn {
        /// The record that is not whole.
        record: u32,
        /// Where it starts; the bytes before it are whole.
        at: u64,
    },
    /// A record's bytes are not those that were written.
    #[error("record {record} of the trace is damaged (its checksum differs): restore the file or record it again")]
    Damaged {
        /// The record.
        record: u32,
    },
    /// A record whose bytes are whole but make no sense.
    #[error("record {record} of the trace {problem}: record it again")]
    Content {
        /// The record.
        record: u32,
        /// What is wrong with it.
        problem: String,
    },
    /// Two requests have one id.
    #[error("records {first} and {record} of the trace both have the id `{}`: record it again", shown(id))]
    DuplicateId {
        /// The second.
        record: u32,
        /// The first.
        first: u32,
        /// Their id.
        id: String,
    },
}
