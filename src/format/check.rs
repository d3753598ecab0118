//! The checks: one CRC for all, and how a record's two are put together. The specification says what they are good for.

/// CRC-32/ISO-HDLC of `bytes`, going on from `start`, as zlib's `crc32(start, bytes)`.
pub(super) fn crc(start: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(start);
    hasher.update(bytes);
    hasher.finalize()
}

/// The head check: kind and length (`word`), `behind`, position, and the low half of the salt.
pub(super) fn head(word: [u8; 4], behind: [u8; 4], lsn: u64, salt: u64) -> [u8; 4] {
    let [start, _] = halves(salt);
    let [lsn_low, lsn_high] = halves(lsn);
    crc(u32::from_le_bytes(start), [word, behind, lsn_low, lsn_high].as_flattened()).to_le_bytes()
}

/// The checksum: the body, of which `body_crc` is the CRC, bound to its head and to the high half of the salt.
pub(super) fn whole(body_crc: u32, head: [u8; 4], salt: u64) -> [u8; 4] {
    let [_, mask] = halves(salt);
    (body_crc ^ u32::from_le_bytes(head) ^ u32::from_le_bytes(mask)).to_le_bytes()
}

/// The low and the high half of a number, as bytes.
fn halves(number: u64) -> [[u8; 4]; 2] {
    let [a, b, c, d, e, f, g, h] = number.to_le_bytes();
    [[a, b, c, d], [e, f, g, h]]
}
