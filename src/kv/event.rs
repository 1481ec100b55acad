use super::BlockName;

/// What happened to a block, by its number in the [`Ledger`](super::Ledger). Numbers are used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockEvent {
    /// A block begins, empty.
    Allocated(u32),
    /// It got `n_tokens` more.
    Extended {
        /// Which.
        block: u32,
        /// How many.
        n_tokens: u32,
    },
    /// It has all its tokens.
    Filled {
        /// Which.
        block: u32,
        /// What it is found by; none if another block was called the same first.
        name: Option<BlockName>,
    },
    /// One more sequence holds it.
    Shared(u32),
    /// `to` begins with what `from`, which others go on holding, has so far.
    Copied {
        /// The one that stays as it is.
        from: u32,
        /// The one that will grow.
        to: u32,
    },
    /// `from`, just filled, turned out to be `into`; it is freed next.
    Merged {
        /// The newer one.
        from: u32,
        /// The one that stays.
        into: u32,
    },
    /// Nobody holds it any more.
    Freed {
        /// Which.
        block: u32,
        /// What it was found by.
        name: Option<BlockName>,
    },
}
