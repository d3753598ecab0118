//! What names a piece of work: keys, fingerprints and fencing tokens.
//!
//! Bytes are taken exactly as they are given: nothing is trimmed, folded or cut, and every byte value is legal. What
//! does not fit is refused, so that two different names never become one. The recipes of [`Fingerprint`] and
//! [`Key::downstream_key`] are frozen: their golden values are in the tests below.
//!
//! This file knows nothing of disks, time or options.

use std::error;
use std::fmt;
use std::hash::Hasher as _;
use std::num::ParseIntError;
use std::str::FromStr;
use std::sync::Arc;

use siphasher::sip::SipHasher13;

/// The longest id, in bytes.
pub(crate) const ID_BYTES_MAX: usize = 255;

/// The longest scope, in bytes.
pub(crate) const SCOPE_BYTES_MAX: usize = 255;

/// Sets downstream keys apart from every other use of BLAKE3. Frozen.
const DOWNSTREAM_CONTEXT: &str = "keyonce 2026 downstream key v1";

/// Sets fingerprints apart from every other use of BLAKE3. Frozen.
const FINGERPRINT_CONTEXT: &str = "keyonce 2026 fingerprint v1";

/// Sets the digests that `Debug` shows apart from every other use of BLAKE3.
const DEBUG_CONTEXT: &str = "keyonce 2026 debug digest v1";

/// Names one piece of work: a scope and an id.
///
/// The *id* is the client's idempotency key. The *scope* keeps equal ids of different tenants or endpoints apart. Both
/// are plain bytes, compared exactly: `AbC` and `abc` are two ids, and so are `a` and `a` with a trailing space.
///
/// `Debug` shows a digest and never the bytes, since clients put secrets and addresses into ids.
///
/// ```
/// # fn main() -> Result<(), keyonce::InvalidKey> {
/// let key = keyonce::Key::new("tenant-7/charges", "4f9c0d1e-order-1001")?;
/// assert_eq!(key.scope(), b"tenant-7/charges");
/// assert_eq!(key.id(), b"4f9c0d1e-order-1001");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Key {
    /// The length of the scope in one byte, the scope, the id: what the key hash runs over, in one piece. Shared by the
    /// clones, of which every guard and every future keeps one.
    framed: Arc<[u8]>,
}

impl Key {
    /// The longest id, in bytes.
    pub const ID_BYTES_MAX: usize = ID_BYTES_MAX;
    /// The longest scope, in bytes.
    pub const SCOPE_BYTES_MAX: usize = SCOPE_BYTES_MAX;

    /// Makes a key of a scope of 0 to 255 bytes and an id of 1 to 255 bytes.
    ///
    /// # Errors
    ///
    /// [`InvalidKey`] if the id is empty, or if one of the two is too long.
    pub fn new(scope: impl AsRef<[u8]>, id: impl AsRef<[u8]>) -> Result<Self, InvalidKey> {
        let (scope, id) = (scope.as_ref(), id.as_ref());
        let scope_len = scope_len(scope)?;
        if id.is_empty() {
            return Err(InvalidKey::EmptyId);
        }
        if id.len() > ID_BYTES_MAX {
            return Err(InvalidKey::IdTooLong { bytes: id.len() });
        }
        let mut framed = [0; 1 + SCOPE_BYTES_MAX + ID_BYTES_MAX];
        let (head, tail) = framed.split_at_mut(1 + scope.len());
        let (length, scope_part) = head.split_at_mut(1);
        length.fill(scope_len);
        scope_part.copy_from_slice(scope);
        tail.split_at_mut(id.len()).0.copy_from_slice(id);
        Ok(Self { framed: Arc::from(framed.split_at(1 + scope.len() + id.len()).0) })
    }

    /// The scope, byte for byte as it was given.
    pub fn scope(&self) -> &[u8] {
        self.parts().0
    }

    /// The id, byte for byte as it was given.
    pub fn id(&self) -> &[u8] {
        self.parts().1
    }

    /// The idempotency key to send on to a receiver that honours one: 32 lower-case hexadecimal digits.
    ///
    /// It depends on scope, id and `label` alone, so that every attempt, another process and a restored store all send
    /// the same. The label tells several calls of one piece of work apart, such as `"charge"` and `"receipt"`. It
    /// reveals neither scope nor id, except to somebody who can guess both.
    ///
    /// ```
    /// # fn main() -> Result<(), keyonce::InvalidKey> {
    /// let key = keyonce::Key::new("tenant-7", "order-1001")?;
    /// let charge = key.downstream_key("charge");
    /// assert_eq!(charge.len(), 32);
    /// assert_eq!(charge, key.downstream_key("charge"));
    /// assert_ne!(charge, key.downstream_key("receipt"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn downstream_key(&self, label: &str) -> String {
        let mut hasher = blake3::Hasher::new_derive_key(DOWNSTREAM_CONTEXT);
        for part in [self.scope(), self.id(), label.as_bytes()] {
            hasher.update(&length_frame(part.len()));
            hasher.update(part);
        }
        hex(&first_half(&hasher))
    }

    /// The keyed hash that places the key in the index: SipHash-1-3 over the length of the scope, the scope and the id.
    pub(crate) fn hash(&self, seed: &HashSeed) -> u64 {
        SipHasher13::new_with_key(&seed.0).hash(&self.framed)
    }

    fn parts(&self) -> (&[u8], &[u8]) {
        let (scope_len, rest) = self.framed.split_first().expect("a key holds at least the length of its scope");
        rest.split_at(usize::from(*scope_len))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", debug_digest(&self.framed))
    }
}

/// A checked scope, for callers that make many keys of one tenant or endpoint.
///
/// ```
/// # fn main() -> Result<(), keyonce::InvalidKey> {
/// let charges = keyonce::Scope::new("tenant-7/charges")?;
/// assert_eq!(charges.key("order-1001")?, keyonce::Key::new("tenant-7/charges", "order-1001")?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Scope {
    bytes: Box<[u8]>,
}

impl Scope {
    /// Makes a scope of 0 to 255 bytes.
    ///
    /// # Errors
    ///
    /// [`InvalidKey::ScopeTooLong`] beyond 255 bytes.
    pub fn new(scope: impl AsRef<[u8]>) -> Result<Self, InvalidKey> {
        let scope = scope.as_ref();
        scope_len(scope)?;
        Ok(Self { bytes: scope.into() })
    }

    /// The key of `id` in this scope.
    ///
    /// # Errors
    ///
    /// [`InvalidKey`] if the id is empty or longer than 255 bytes.
    pub fn key(&self, id: impl AsRef<[u8]>) -> Result<Key, InvalidKey> {
        Key::new(&self.bytes, id)
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scope({})", debug_digest(&self.bytes))
    }
}

/// Why bytes are not a key. They are refused, never cut to fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum InvalidKey {
    /// The id is empty.
    EmptyId,
    /// The id is longer than [`Key::ID_BYTES_MAX`].
    IdTooLong {
        /// How long it is.
        bytes: usize,
    },
    /// The scope is longer than [`Key::SCOPE_BYTES_MAX`].
    ScopeTooLong {
        /// How long it is.
        bytes: usize,
    },
}

impl fmt::Display for InvalidKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EmptyId => write!(f, "the id of the key is empty"),
            Self::IdTooLong { bytes } => {
                write!(f, "the id of the key has {bytes} bytes, more than {ID_BYTES_MAX}")
            }
            Self::ScopeTooLong { bytes } => {
                write!(f, "the scope of the key has {bytes} bytes, more than {SCOPE_BYTES_MAX}")
            }
        }
    }
}

impl error::Error for InvalidKey {}

/// A 128-bit digest of the request that must be the same on every retry of a key.
///
/// Build it from what makes the request what it is: method, path, body. Leave out what differs between honest retries,
/// such as dates and trace ids. It is BLAKE3 over length-framed parts, truncated; the recipe is frozen, since a retry
/// may come after an upgrade.
///
/// ```
/// use keyonce::Fingerprint;
///
/// let body = b"amount=100";
/// assert_eq!(Fingerprint::of(body), Fingerprint::of_parts([body]));
/// assert_ne!(Fingerprint::of_parts(["a", "bc"]), Fingerprint::of_parts(["ab", "c"]));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 16]);

impl Fingerprint {
    /// The fingerprint of a request that is one piece of bytes.
    pub fn of(body: impl AsRef<[u8]>) -> Self {
        Self::builder().part(body).finish()
    }

    /// The fingerprint of a request of several parts. Their borders count, and so does an empty part.
    pub fn of_parts<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> Self {
        let mut builder = Self::builder();
        parts.into_iter().for_each(|part| builder.add(part.as_ref()));
        builder.finished()
    }

    /// Starts a fingerprint that is built part by part, for parts of different types and bodies that come in chunks.
    pub fn builder() -> FingerprintBuilder {
        FingerprintBuilder { hasher: blake3::Hasher::new_derive_key(FINGERPRINT_CONTEXT), streamed_bytes: None }
    }

    /// Takes 128 bits that were made elsewhere, by a recipe of the caller's own.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The 128 bits, as [`Fingerprint::from_bytes`] takes them.
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({})", hex(&self.0))
    }
}

/// Builds a [`Fingerprint`] part by part.
///
/// A part counts by its bytes, however they were cut into chunks:
///
/// ```
/// use keyonce::Fingerprint;
///
/// let streamed = Fingerprint::builder().part("POST").write("amount=").write("100").finish();
/// assert_eq!(streamed, Fingerprint::of_parts(["POST", "amount=100"]));
/// ```
#[derive(Clone)]
#[must_use = "a builder makes a fingerprint only by `finish`"]
pub struct FingerprintBuilder {
    /// Each part is its bytes followed by their number. The last eight bytes always tell where the last part begins, so
    /// no two lists of parts give the same bytes, and a length need not be known before its part ends.
    hasher: blake3::Hasher,
    /// How long the part being streamed is so far; `None` between parts.
    streamed_bytes: Option<usize>,
}

impl FingerprintBuilder {
    /// Adds a whole part. A part being streamed ends before it.
    pub fn part(mut self, part: impl AsRef<[u8]>) -> Self {
        self.add(part.as_ref());
        self
    }

    /// Appends a chunk to the part being streamed; the first chunk begins the part, also when it is empty.
    pub fn write(mut self, chunk: impl AsRef<[u8]>) -> Self {
        self.stream(chunk.as_ref());
        self
    }

    /// Ends the part being streamed, which is empty if no chunk came.
    ///
    /// Call it after a loop that may see no chunk at all, or between two streamed parts. Otherwise
    /// [`finish`](Self::finish) does.
    pub fn end_part(mut self) -> Self {
        self.end();
        self
    }

    /// The fingerprint of the parts so far. A part being streamed ends here.
    pub fn finish(mut self) -> Fingerprint {
        self.finished()
    }

    // The hash is two kilobytes, so what is done step by step is done in place.

    fn add(&mut self, part: &[u8]) {
        if self.streamed_bytes.is_some() {
            self.end();
        }
        self.stream(part);
        self.end();
    }

    fn stream(&mut self, chunk: &[u8]) {
        self.hasher.update(chunk);
        self.streamed_bytes = Some(self.streamed_bytes.unwrap_or(0) + chunk.len());
    }

    fn end(&mut self) {
        let bytes = self.streamed_bytes.take().unwrap_or(0);
        self.hasher.update(&length_frame(bytes));
    }

    fn finished(&mut self) -> Fingerprint {
        if self.streamed_bytes.is_some() {
            self.end();
        }
        Fingerprint(first_half(&self.hasher))
    }
}

impl fmt::Debug for FingerprintBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The state of the hash tells about the request, so it is not shown.
        f.debug_struct("FingerprintBuilder").finish_non_exhaustive()
    }
}

/// A fencing token: larger than every earlier one of the store, also across restarts.
///
/// Only the latest owner of a key acts on it; equality with the key's token decides. Hand it to a resource that refuses
/// smaller tokens than the largest it has seen, and late work of an earlier owner is refused there, too.
///
/// ```
/// # fn main() -> Result<(), std::num::ParseIntError> {
/// let token: keyonce::Token = "4711".parse()?;
/// assert_eq!(token, keyonce::Token::from_u64(4711));
/// assert_eq!(token.to_string(), "4711");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(u64);

impl Token {
    /// The token of this number, as [`Token::to_u64`] gave it.
    pub const fn from_u64(number: u64) -> Self {
        Self(number)
    }

    /// The number of the token, to be stored or sent elsewhere.
    pub const fn to_u64(self) -> u64 {
        self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({})", self.0)
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl FromStr for Token {
    type Err = ParseIntError;

    fn from_str(decimal: &str) -> Result<Self, Self::Err> {
        decimal.parse().map(Self)
    }
}

/// The random seed of a store's key hash, so that nobody outside can choose keys that meet in one bucket.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct HashSeed(pub(crate) [u8; 16]);

impl HashSeed {
    /// [`Key::hash`] of the parts of a key that stand in a record.
    pub(crate) fn hash(&self, scope: &[u8], id: &[u8]) -> u64 {
        let mut hasher = SipHasher13::new_with_key(&self.0);
        hasher.write_u8(u8::try_from(scope.len()).expect("a scope has at most 255 bytes"));
        hasher.write(scope);
        hasher.write(id);
        hasher.finish()
    }
}

impl fmt::Debug for HashSeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HashSeed(..)")
    }
}

/// The length of a scope as the one byte that stands before it.
fn scope_len(scope: &[u8]) -> Result<u8, InvalidKey> {
    u8::try_from(scope.len()).map_err(|_| InvalidKey::ScopeTooLong { bytes: scope.len() })
}

/// The eight bytes that tell the length of a part in a digest.
fn length_frame(bytes: usize) -> [u8; 8] {
    u64::try_from(bytes).expect("a length in memory fits 64 bits").to_le_bytes()
}

/// The first 128 of the 256 bits of a BLAKE3 digest.
fn first_half(hasher: &blake3::Hasher) -> [u8; 16] {
    let mut half = [0; 16];
    hasher.finalize_xof().fill(&mut half);
    half
}

/// Lower-case hexadecimal digits, two a byte.
fn hex(bytes: &[u8]) -> String {
    use fmt::Write as _;

    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut digits, byte| {
        write!(digits, "{byte:02x}").expect("writing to a string never fails");
        digits
    })
}

/// Eight hexadecimal digits that tell names apart in a log without showing them.
fn debug_digest(bytes: &[u8]) -> String {
    let mut digits = hex(&first_half(blake3::Hasher::new_derive_key(DEBUG_CONTEXT).update(bytes)));
    digits.truncate(8);
    digits
}

#[cfg(test)]
mod tests {
    use std::hash::Hasher as _;

    use super::*;

    const SEED: HashSeed = HashSeed([7; 16]);

    #[test]
    fn names_are_kept_byte_for_byte() {
        let cases: [(&[u8], &[u8]); 8] = [
            (b"", b"a"),
            (b"tenant", b"AbC"),
            (b"tenant", b"abc"),
            (b"tenant", b"abc "),
            (b"tenant ", b"abc"),
            (b"\0", b"\0"),
            (b"", b"a\0b"),
            (b"\xff\xfe", b"\xc3\x28"),
        ];
        for (at, (scope, id)) in cases.iter().enumerate() {
            let key = Key::new(scope, id).unwrap();
            assert_eq!((key.scope(), key.id()), (*scope, *id));
            for (other_at, (other_scope, other_id)) in cases.iter().enumerate() {
                let other = Key::new(other_scope, other_id).unwrap();
                assert_eq!(key == other, at == other_at, "{scope:?} {id:?} against {other_scope:?} {other_id:?}");
                assert_eq!(key.hash(&SEED) == other.hash(&SEED), at == other_at);
                assert_eq!(key.downstream_key("x") == other.downstream_key("x"), at == other_at);
            }
        }
    }

    #[test]
    fn the_border_between_scope_and_id_counts() {
        let (left, right) = (Key::new("a", "bc").unwrap(), Key::new("ab", "c").unwrap());
        assert_ne!(left, right);
        assert_ne!(left.hash(&SEED), right.hash(&SEED));
        assert_ne!(left.downstream_key(""), right.downstream_key(""));
        assert_ne!(format!("{left:?}"), format!("{right:?}"));
    }

    #[test]
    fn the_border_between_id_and_label_counts() {
        assert_ne!(Key::new("", "a").unwrap().downstream_key("bc"), Key::new("", "ab").unwrap().downstream_key("c"));
    }

    #[test]
    fn lengths_are_refused_and_never_cut() {
        let (full, over) = ([b'x'; 255], [b'x'; 256]);
        let key = Key::new(full, full).unwrap();
        assert_eq!((key.scope(), key.id()), (&full[..], &full[..]));
        assert_eq!(Key::new("", over), Err(InvalidKey::IdTooLong { bytes: 256 }));
        assert_eq!(Key::new(over, "a"), Err(InvalidKey::ScopeTooLong { bytes: 256 }));
        assert_eq!(Key::new("scope", ""), Err(InvalidKey::EmptyId));
        assert_eq!(Scope::new(over), Err(InvalidKey::ScopeTooLong { bytes: 256 }));
        assert_eq!(Scope::new(full).unwrap().key(""), Err(InvalidKey::EmptyId));
        assert_eq!(Scope::new(full).unwrap().key(full).unwrap(), key);
        assert_eq!(Scope::new("").unwrap().key("a").unwrap(), Key::new("", "a").unwrap());
    }

    #[test]
    fn debug_shows_a_digest_and_never_the_bytes() {
        let key = Key::new("secret", "secret").unwrap();
        let shown = format!("{key:?} {:?} {SEED:?}", Scope::new("secret").unwrap());
        assert!(!shown.contains("secret"), "{shown}");
        let digest = format!("{key:?}");
        assert_eq!(digest.len(), "Key(01234567)".len());
        assert!(digest[4..12].bytes().all(|digit| digit.is_ascii_hexdigit()), "{digest}");
    }

    #[test]
    fn the_hash_is_siphash_1_3_over_the_framed_parts() {
        let key = Key::new("tenant-7", "order-1001").unwrap();
        let mut streamed = SipHasher13::new_with_key(&SEED.0);
        streamed.write(&[8]);
        streamed.write(b"tenant-7");
        streamed.write(b"order-1001");
        assert_eq!(key.hash(&SEED), streamed.finish());
        assert_ne!(key.hash(&SEED), key.hash(&HashSeed([8; 16])));
    }

    // The recipe is frozen: a receiver has seen these keys, and another version of the crate must send the same.
    #[test]
    fn downstream_keys_never_change() {
        let cases = [
            ("", "a", "", "5c708cd4e82e784362262d438aeb1b9d"),
            ("tenant-7", "order-1001", "charge", "6852f19f363bda3788ff795c38939484"),
            ("tenant-7", "order-1001", "receipt", "38a511a1166eddd7d3ac412e7e8cf27e"),
        ];
        for (scope, id, label, golden) in cases {
            assert_eq!(Key::new(scope, id).unwrap().downstream_key(label), golden, "{scope} {id} {label}");
        }
    }

    // The recipe is frozen: fingerprints are stored, and a retry after an upgrade must match.
    #[test]
    fn fingerprints_never_change() {
        let cases: [(&[&str], &str); 5] = [
            (&[], "d6bf8a8be154bf75db4989d00ab4645f"),
            (&[""], "1680d5980780cdf344635d527232cc0b"),
            (&["amount=100"], "c3b40dad63b8f967e2fab5763a3f099f"),
            (&["a", "bc"], "ff3bfc9c68debe3678bbef7bcf0564c7"),
            (&["POST", "/charges", "amount=100"], "0cad8d181ff5fcfdbe99b9b20782512a"),
        ];
        for (parts, golden) in cases {
            assert_eq!(hex(&Fingerprint::of_parts(parts).to_bytes()), golden, "{parts:?}");
        }
        let long: Vec<u8> = (0..100_000_u32).map(|at| at.to_le_bytes()[0]).collect();
        assert_eq!(hex(&Fingerprint::of(long).to_bytes()), "cd048cadc5a285f4eb2b7f22f393406a");
    }

    #[test]
    fn borders_and_empty_parts_count_in_a_fingerprint() {
        let zero_length = [0; 8];
        let lists: [&[&[u8]]; 9] = [
            &[],
            &[b""],
            &[b"", b""],
            &[b"a", b"bc"],
            &[b"ab", b"c"],
            &[b"abc"],
            &[b"abc", b""],
            &[b"", b"abc"],
            &[&zero_length],
        ];
        for (at, list) in lists.iter().enumerate() {
            for (other_at, other) in lists.iter().enumerate() {
                let equal = Fingerprint::of_parts(*list) == Fingerprint::of_parts(*other);
                assert_eq!(equal, at == other_at, "{list:?} against {other:?}");
            }
        }
    }

    #[test]
    fn a_streamed_part_equals_the_whole_part() {
        let whole = Fingerprint::of_parts(["POST", "amount=100", "end"]);
        let builder = Fingerprint::builder;
        assert_eq!(builder().part("POST").write("amount=").write("").write("100").part("end").finish(), whole);
        assert_eq!(builder().write("PO").write("ST").end_part().part("amount=100").write("end").finish(), whole);
        assert_eq!(builder().part("amount=100").finish(), Fingerprint::of("amount=100"));
        assert_eq!(builder().finish(), Fingerprint::of_parts([""; 0]));
        for empty in [builder().part(""), builder().write(""), builder().end_part(), builder().write("").end_part()] {
            assert_eq!(empty.finish(), Fingerprint::of(""));
        }
    }

    #[test]
    fn a_fingerprint_keeps_its_bytes() {
        const GIVEN: Fingerprint = Fingerprint::from_bytes(*b"0123456789abcdef");
        assert_eq!(GIVEN.to_bytes(), *b"0123456789abcdef");
        assert_eq!(format!("{GIVEN:?}"), "Fingerprint(30313233343536373839616263646566)");
    }

    #[test]
    fn tokens_are_decimal_and_ordered() {
        for number in [0, 1, 8, u64::MAX] {
            let token = Token::from_u64(number);
            assert_eq!(token.to_string().parse(), Ok(token));
            assert_eq!(token.to_u64(), number);
        }
        assert!(Token::from_u64(8) < Token::from_u64(16));
        for refused in ["", " 1", "-1", "0x10", "18446744073709551616"] {
            assert!(refused.parse::<Token>().is_err(), "{refused}");
        }
    }
}
