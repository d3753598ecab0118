//! What is written once a run or a life: the store file, and the header copies of a segment's life.

use std::fmt;

use super::check::crc;
use super::{DATA_START, Fields, Fill, HEADER_BYTES, STORE_FILE_BYTES, UNIT_BYTES, VERSION, is_zero};
use crate::clock::TimeMark;

const STORE_MAGIC: [u8; 8] = *b"KEYONCE\0";
const SEGMENT_MAGIC: [u8; 8] = *b"KEYSEG\0\0";

/// The store file: what the store is, and where its latest run began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoreFile {
    /// Random; in every segment header, so that segments of another store are never taken for ours.
    pub(crate) store_id: [u8; 16],
    /// The seed of the index's hash.
    pub(crate) hash_seed: [u8; 16],
    /// When the store was made, by the wall clock.
    pub(crate) created_ms: u64,
    /// The number of the segment with which the latest run began: a store whose newest segment is older has lost some.
    pub(crate) run_number: u64,
}

/// Why bytes are no store file of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreFileFault {
    /// The magic is not ours.
    Foreign,
    /// A sound store file of another format version.
    Version(u32),
    /// Ours, and damaged: wrong size, failed check or senseless fields.
    Damaged,
}

impl StoreFile {
    /// The bytes of the store file.
    pub(crate) fn encode(&self) -> [u8; STORE_FILE_BYTES] {
        let mut bytes = [0; STORE_FILE_BYTES];
        Fill(&mut bytes)
            .put(STORE_MAGIC)
            .u32(VERSION)
            .u32(0)
            .put(self.store_id)
            .put(self.hash_seed)
            .u64(self.created_ms)
            .u64(self.run_number);
        seal(&mut bytes);
        bytes
    }

    /// Reads a store file; `bytes` is the whole file.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, StoreFileFault> {
        if !bytes.starts_with(&STORE_MAGIC) {
            return Err(StoreFileFault::Foreign);
        }
        let bytes: &[u8; STORE_FILE_BYTES] = bytes.try_into().map_err(|_| StoreFileFault::Damaged)?;
        let version = sealed_version(bytes).ok_or(StoreFileFault::Damaged)?;
        if version != VERSION {
            return Err(StoreFileFault::Version(version));
        }
        Self::fields(bytes).ok_or(StoreFileFault::Damaged)
    }

    fn fields(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        fields.slice(STORE_MAGIC.len() + 4)?;
        let zero = fields.u32()?;
        let store_id = fields.array()?;
        let hash_seed = fields.array()?;
        let created_ms = fields.u64()?;
        let run_number = fields.u64()?;
        let zeros = fields.slice(444)?;
        (zero == 0 && is_zero(zeros)).then_some(Self { store_id, hash_seed, created_ms, run_number })
    }
}

/// What a segment was made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The log rolled into it.
    Rolled,
    /// An opening copied into it what it found, and nothing in it counts without its Sealed.
    Recovery,
}

impl Role {
    fn code(self) -> u8 {
        match self {
            Self::Rolled => 1,
            Self::Recovery => 2,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Rolled),
            2 => Some(Self::Recovery),
            _ => None,
        }
    }
}

/// A segment's header: one life of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentHeader {
    /// What the segment was made for.
    pub(crate) role: Role,
    /// The store it belongs to.
    pub(crate) store_id: [u8; 16],
    /// The run that wrote it, the only one that ever writes into it.
    pub(crate) run_id: [u8; 16],
    /// Its number, from 1.
    pub(crate) number: u64,
    /// The number of the segment before it in the chain, less than its own; 0: none.
    pub(crate) previous: u64,
    /// The size of the file.
    pub(crate) segment_bytes: u64,
    /// The LSN of the file's offset 0; with the size added it still fits a u64.
    pub(crate) first_lsn: u64,
    /// How far the log was synced when the header was written.
    pub(crate) synced_lsn: u64,
    /// The oldest segment that still counted when the header was written.
    pub(crate) oldest_live: u64,
    /// When the header was written.
    pub(crate) time: TimeMark,
    /// Random; in the checks of every record of this life.
    pub(crate) salt: u64,
}

/// Why bytes are no header copy of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeaderFault {
    /// All zero: never written.
    Blank,
    /// The magic is not ours.
    Foreign,
    /// A sound header of another format version.
    Version(u32),
    /// Ours, and damaged: too short, failed check, the other copy, or senseless fields.
    Damaged,
}

impl SegmentHeader {
    /// The bytes of copy 0 or 1.
    pub(crate) fn encode(&self, copy: u8) -> [u8; HEADER_BYTES] {
        assert!(copy < 2 && self.makes_sense(), "a header must be one that can be read back: {self:?}");
        let mut bytes = [0; HEADER_BYTES];
        Fill(&mut bytes)
            .put(SEGMENT_MAGIC)
            .u32(VERSION)
            .put([self.role.code(), copy, 0, 0])
            .put(self.store_id)
            .put(self.run_id)
            .u64(self.number)
            .u64(self.previous)
            .u64(self.segment_bytes)
            .u64(self.first_lsn)
            .u64(self.synced_lsn)
            .u64(self.oldest_live)
            .u64(self.time.store_ms)
            .u64(self.time.boot_ms)
            .u64(self.time.wall_ms)
            .put(self.time.boot_id)
            .u64(self.salt);
        seal(&mut bytes);
        bytes
    }

    /// Reads copy 0 or 1 from the start of `bytes`.
    pub(crate) fn decode(bytes: &[u8], copy: u8) -> Result<Self, HeaderFault> {
        let bytes: &[u8; HEADER_BYTES] = bytes.first_chunk().ok_or(HeaderFault::Damaged)?;
        if !bytes.starts_with(&SEGMENT_MAGIC) {
            return Err(if is_zero(bytes) { HeaderFault::Blank } else { HeaderFault::Foreign });
        }
        let version = sealed_version(bytes).ok_or(HeaderFault::Damaged)?;
        if version != VERSION {
            return Err(HeaderFault::Version(version));
        }
        Self::fields(bytes, copy).filter(Self::makes_sense).ok_or(HeaderFault::Damaged)
    }

    fn fields(bytes: &[u8], copy: u8) -> Option<Self> {
        let mut fields = Fields(bytes);
        fields.slice(SEGMENT_MAGIC.len() + 4)?;
        let [role, copy_found, 0, 0] = fields.array()? else {
            return None;
        };
        let header = Self {
            role: Role::from_code(role)?,
            store_id: fields.array()?,
            run_id: fields.array()?,
            number: fields.u64()?,
            previous: fields.u64()?,
            segment_bytes: fields.u64()?,
            first_lsn: fields.u64()?,
            synced_lsn: fields.u64()?,
            oldest_live: fields.u64()?,
            time: TimeMark {
                store_ms: fields.u64()?,
                boot_ms: fields.u64()?,
                wall_ms: fields.u64()?,
                boot_id: fields.array()?,
            },
            salt: fields.u64()?,
        };
        (copy_found == copy && is_zero(fields.slice(108)?)).then_some(header)
    }

    /// What every reader of a header may rely on: numbers go up along the chain, and positions neither overflow nor
    /// fall between units.
    fn makes_sense(&self) -> bool {
        let unit = UNIT_BYTES as u64;
        self.previous < self.number
            && self.segment_bytes > DATA_START
            && self.segment_bytes.is_multiple_of(unit)
            && self.first_lsn.is_multiple_of(unit)
            && self.first_lsn.checked_add(self.segment_bytes).is_some()
    }
}

/// Writes the check of all bytes before it into the last four.
fn seal(bytes: &mut [u8]) {
    let (covered, check) = bytes.split_last_chunk_mut().expect("a sealed block is longer than its check");
    *check = crc(0, covered).to_le_bytes();
}

/// The version a block tells, if its check holds; the block starts with eight bytes of magic.
fn sealed_version(bytes: &[u8]) -> Option<u32> {
    let (covered, check) = bytes.split_last_chunk()?;
    let mut fields = Fields(covered);
    fields.slice(8)?;
    let version = fields.u32()?;
    (crc(0, covered) == u32::from_le_bytes(*check)).then_some(version)
}

impl fmt::Display for StoreFileFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign => f.write_str("it is no store file of keyonce"),
            Self::Version(version) => write!(f, "its format version is {version}, this build knows {VERSION}"),
            Self::Damaged => f.write_str("the store file is damaged"),
        }
    }
}

impl fmt::Display for HeaderFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blank => f.write_str("the header was never written"),
            Self::Foreign => f.write_str("it is no segment header of keyonce"),
            Self::Version(version) => write!(f, "its format version is {version}, this build knows {VERSION}"),
            Self::Damaged => f.write_str("the header is damaged"),
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn store_files() -> impl Strategy<Value = StoreFile> {
        any::<([u8; 16], [u8; 16], u64, u64)>().prop_map(|(store_id, hash_seed, created_ms, run_number)| StoreFile {
            store_id,
            hash_seed,
            created_ms,
            run_number,
        })
    }

    prop_compose! {
        fn headers()(
            role in prop_oneof![Just(Role::Rolled), Just(Role::Recovery)],
            (store_id, run_id, boot_id) in any::<([u8; 16], [u8; 16], [u8; 16])>(),
            (number, previous) in (1..=u64::MAX).prop_flat_map(|number| (Just(number), 0..number)),
            (segment_units, first_unit) in (1025..1_u64 << 30, 0..1_u64 << 60),
            [synced_lsn, oldest_live, store_ms, boot_ms, wall_ms, salt] in any::<[u64; 6]>(),
        ) -> SegmentHeader {
            SegmentHeader {
                role, store_id, run_id, number, previous, segment_bytes: segment_units * 8, first_lsn: first_unit * 8,
                synced_lsn, oldest_live, time: TimeMark { store_ms, boot_ms, wall_ms, boot_id }, salt,
            }
        }
    }

    proptest! {
        #[test]
        fn a_store_file_is_read_as_written_and_fails_with_any_bit_flipped(store in store_files()) {
            let mut bytes = store.encode();
            prop_assert_eq!(StoreFile::decode(&bytes), Ok(store));
            for bit in 0..bytes.len() * 8 {
                bytes[bit / 8] ^= 1 << (bit % 8);
                let fault = if bit < 64 { StoreFileFault::Foreign } else { StoreFileFault::Damaged };
                prop_assert_eq!(StoreFile::decode(&bytes), Err(fault), "bit {}", bit);
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }

        #[test]
        fn a_header_is_read_as_written_and_fails_with_any_bit_flipped(header in headers(), copy in 0..2_u8) {
            let mut bytes = header.encode(copy);
            prop_assert_eq!(SegmentHeader::decode(&bytes, copy), Ok(header));
            prop_assert_eq!(SegmentHeader::decode(&bytes, 1 - copy), Err(HeaderFault::Damaged));
            prop_assert_eq!(SegmentHeader::decode(&[&bytes[..], &[7; 9]].concat(), copy), Ok(header));
            for bit in 0..bytes.len() * 8 {
                bytes[bit / 8] ^= 1 << (bit % 8);
                let fault = if bit < 64 { HeaderFault::Foreign } else { HeaderFault::Damaged };
                prop_assert_eq!(SegmentHeader::decode(&bytes, copy), Err(fault), "bit {}", bit);
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }

        #[test]
        fn a_cut_file_is_damaged(store in store_files(), header in headers(), cut in 8..512_usize) {
            prop_assert_eq!(StoreFile::decode(&store.encode()[..cut]), Err(StoreFileFault::Damaged));
            let longer = [&store.encode()[..], &[0]].concat();
            prop_assert_eq!(StoreFile::decode(&longer), Err(StoreFileFault::Damaged));
            let header = &header.encode(0)[..cut / 2];
            prop_assert_eq!(SegmentHeader::decode(header, 0), Err(HeaderFault::Damaged));
        }

        #[test]
        fn another_version_is_told_only_when_its_check_holds(
            store in store_files(), header in headers(), version in any::<u32>(),
        ) {
            prop_assume!(version != VERSION);
            let (mut store, mut header) = (store.encode(), header.encode(1));
            for block in [&mut store[..], &mut header[..]] {
                block[8..12].copy_from_slice(&version.to_le_bytes());
            }
            prop_assert_eq!(StoreFile::decode(&store), Err(StoreFileFault::Damaged));
            prop_assert_eq!(SegmentHeader::decode(&header, 1), Err(HeaderFault::Damaged));
            seal(&mut store);
            seal(&mut header);
            prop_assert_eq!(StoreFile::decode(&store), Err(StoreFileFault::Version(version)));
            prop_assert_eq!(SegmentHeader::decode(&header, 1), Err(HeaderFault::Version(version)));
        }

        #[test]
        fn what_is_read_has_one_encoding(header in headers(), at in 0..252_usize, byte in any::<u8>()) {
            let mut bytes = header.encode(0);
            bytes[at] = byte;
            seal(&mut bytes);
            if let Ok(found) = SegmentHeader::decode(&bytes, 0) {
                prop_assert_eq!(found.encode(0), bytes);
            }
        }
    }

    #[test]
    fn what_no_writer_writes_is_damaged_though_its_check_holds() {
        let time = TimeMark { store_ms: 4, boot_ms: 3, wall_ms: 2, boot_id: [1; 16] };
        let header = SegmentHeader {
            role: Role::Rolled,
            store_id: [2; 16],
            run_id: [3; 16],
            number: 5,
            previous: 4,
            segment_bytes: 65536,
            first_lsn: 65536,
            synced_lsn: 8192,
            oldest_live: 1,
            time,
            salt: 7,
        };
        for (at, field) in [
            (12, &[0][..]),
            (12, &[3]),
            (13, &[1]),
            (14, &[1]),
            (15, &[1]),
            (48, &[0]),                                              // number 0
            (48, &[4]),                                              // the number of its predecessor
            (56, &[5]),                                              // the other way about
            (64, &[4]),                                              // no multiple of 8
            (64, &[0, 0x20, 0]),                                     // no room for a record
            (72, &[4]),                                              // no multiple of 8
            (72, &[0xF8, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF]), // ends beyond all LSNs
            (144, &[1]),
            (251, &[1]),
        ] {
            let mut bytes = header.encode(0);
            bytes[at..at + field.len()].copy_from_slice(field);
            seal(&mut bytes);
            assert_eq!(SegmentHeader::decode(&bytes, 0), Err(HeaderFault::Damaged), "{field:?} at {at}");
        }
        let store = StoreFile { store_id: [1; 16], hash_seed: [2; 16], created_ms: 3, run_number: 4 };
        for at in [12, 15, 64, 300, 507] {
            let mut bytes = store.encode();
            bytes[at] = 1;
            seal(&mut bytes);
            assert_eq!(StoreFile::decode(&bytes), Err(StoreFileFault::Damaged), "byte {at}");
        }
    }

    #[test]
    fn zeros_are_blank_and_other_bytes_foreign() {
        assert_eq!(SegmentHeader::decode(&[0; 4096], 0), Err(HeaderFault::Blank));
        assert_eq!(SegmentHeader::decode(&[1; 4096], 0), Err(HeaderFault::Foreign));
        assert_eq!(StoreFile::decode(b""), Err(StoreFileFault::Foreign));
        assert_eq!(StoreFile::decode(b"a text file\n"), Err(StoreFileFault::Foreign));
    }
}
