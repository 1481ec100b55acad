/// What a call came to. The numbers stay what they are; new ones may be added.
///
/// 0 is success. Below 100 are answers that are no mistake. From 100 on the call did nothing, and eldr_last_error()
/// says what was wrong, where, and what to do.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// Nothing has happened yet, or not in the time given.
    Wait = 1,
    /// The request has ended and everything was read.
    End = 2,
    /// The counts weigh nothing, so they have no direction: route by load.
    NoSignature = 3,
    /// Every running worker is full: keep the request and route it again when one has room.
    Full = 4,
    /// Every worker is lost or drained.
    NoWorker = 5,
    /// A pointer that must not be NULL is.
    Null = 100,
    /// The handle was freed, was never made, or is of another kind.
    Handle = 101,
    /// A struct's `size` is not that of this library: it was not initialised, or header and library differ.
    StructSize = 102,
    /// A value is out of its range.
    Argument = 103,
    /// A string is not UTF-8.
    Utf8 = 104,
    /// The buffer is too small; how much is needed was written.
    Buffer = 105,
    /// This build of the library can not do it.
    Unsupported = 106,
    /// The call may not be made from the log callback.
    Reentrant = 107,
    /// eldr has a fault: it panicked, and the panic was caught.
    Panic = 108,
    /// A file could not be read.
    File = 109,
    /// The calibration is not one, or does not fit the model or the workers.
    Calibration = 110,
    /// The settings do not fit together.
    Config = 111,
    /// The request can not be run as it stands.
    Request = 112,
    /// As many requests as allowed are waiting.
    QueueFull = 113,
    /// The engine takes no more requests.
    Draining = 114,
    /// llama.cpp refused.
    Llama = 115,
    /// The tensor layout given is not that of the ggml that runs.
    Layout = 116,
    /// The tap did not see what it must see; its picks can not be used.
    Tap = 117,
    /// Counts, signature or cache belong to another calibration.
    Mismatch = 118,
    /// A worker failed.
    Run = 119,
}
