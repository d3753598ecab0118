//! Rows of one record: it counts, it is a hole or a torn tail, it is damage, or it was replaced and is not judged.

use keyonce::ErrorKind;

use super::{Rows, holds, opens, refused};
use crate::forge::{Directory, Header, Kind, Role, SegmentFile};

/// What is wrong with the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Damage {
    None,
    /// A bit of its head check.
    HeadCheck,
    /// A bit of its length.
    LengthBit,
    /// A length beyond the segment, with a head check that holds.
    LengthBeyond,
    /// A length that its kind cannot have, with a head check that holds.
    LengthTooSmall,
    /// A bit behind its head.
    Body,
    /// Both checks hold, and the id is empty.
    Malformed,
    /// Never written, or zeros now.
    Blank,
    /// A sound record of another place.
    Misplaced,
    /// A sound record of another life of the file.
    OtherLife,
}

const DAMAGES: [Damage; 10] = [
    Damage::None,
    Damage::HeadCheck,
    Damage::LengthBit,
    Damage::LengthBeyond,
    Damage::LengthTooSmall,
    Damage::Body,
    Damage::Malformed,
    Damage::Blank,
    Damage::Misplaced,
    Damage::OtherLife,
];

impl Damage {
    fn apply(self, file: &mut SegmentFile, start: usize, end: usize) {
        let set_units = |file: &mut SegmentFile, units: u32| {
            file.bytes[start + 4..start + 8].copy_from_slice(&((Kind::Done as u32) << 24 | units).to_le_bytes());
            file.repair(start, end);
        };
        match self {
            Self::None => {}
            Self::HeadCheck => file.bytes[start + 8] ^= 1,
            Self::LengthBit => file.bytes[start + 4] ^= 1,
            Self::LengthBeyond => set_units(file, 600),
            Self::LengthTooSmall => set_units(file, 2),
            Self::Body => file.bytes[start + 20] ^= 1,
            Self::Malformed => {
                file.bytes[start + 59] = 0;
                file.repair(start, end);
            }
            Self::Blank => file.bytes[start..end].fill(0),
            Self::Misplaced => {
                let record = file.bytes[start..end].to_vec();
                file.bytes[start..end].fill(0);
                file.bytes[start + 8..end + 8].copy_from_slice(&record);
            }
            Self::OtherLife => {
                let (lsn, salt) = (file.lsn_at(start), file.header.salt() ^ 0x1_0000_0001);
                crate::forge::repair(&mut file.bytes, start..end, lsn, salt);
            }
        }
    }

    fn reason(self) -> &'static str {
        match self {
            Self::None => unreachable!("nothing is wrong"),
            Self::Blank | Self::Misplaced => "nothing was written here",
            Self::HeadCheck | Self::LengthBit | Self::OtherLife => "the head of the record fails its check",
            Self::LengthBeyond | Self::LengthTooSmall => {
                "the record is too short for its kind or longer than its segment"
            }
            Self::Body => "the record fails its checksum",
            Self::Malformed => "the record's checks hold but its fields make no sense",
        }
    }

    /// A head that holds, or a record that verifies behind, says that something was written there once.
    fn shows_a_tear(self) -> bool {
        matches!(self, Self::Body | Self::Malformed)
    }
}

/// Where the record lies, seen from the known synced LSN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Below,
    At,
    Above,
}

/// What says how far the log was synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Witness {
    /// The header of a segment that was made ready behind this one, and never used.
    UnusedHeader,
    SuccessorsHeader,
    LaterRecord,
    Closed,
}

#[derive(Clone, Copy, Debug)]
struct Facts {
    damage: Damage,
    place: Place,
    witness: Witness,
    replaced: bool,
    role: Role,
    followed: bool,
}

impl Facts {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for damage in DAMAGES {
            for place in [Place::Below, Place::At, Place::Above] {
                for witness in [Witness::UnusedHeader, Witness::SuccessorsHeader, Witness::LaterRecord, Witness::Closed]
                {
                    for replaced in [false, true] {
                        for role in [Role::Rolled, Role::Recovery] {
                            for followed in [false, true] {
                                all.push(Self { damage, place, witness, replaced, role, followed });
                            }
                        }
                    }
                }
            }
        }
        // An end mark vouches for all before it, and a later record is one that follows.
        all.retain(|facts| facts.witness != Witness::Closed || facts.place == Place::Below);
        all.retain(|facts| facts.witness != Witness::LaterRecord || facts.followed);
        all
    }

    fn damaged(&self) -> bool {
        self.damage != Damage::None
    }

    /// The directory, and where the record stands in its file.
    fn lay_out(&self) -> (Directory, usize) {
        let mut file = SegmentFile::new(Header { role: self.role, ..Header::first() });
        if self.role == Role::Recovery {
            file.sealed(&[], &[], 0);
        }
        file.done("before", 0);
        let lsn = file.lsn();
        let synced_lsn = match self.place {
            Place::Below => lsn + 8,
            Place::At => lsn,
            Place::Above => lsn - 8,
        };
        let record = file.done("record", 0);
        // Room for a record that lies eight bytes off.
        if self.damage == Damage::Misplaced {
            file.put(Kind::Done, &[0; 8], 0);
        }
        // Nothing ends the scan, the mark of an end neither.
        if self.witness == Witness::Closed {
            file.closed(0);
        }
        if self.followed {
            file.done("behind", if self.witness == Witness::LaterRecord { synced_lsn } else { 0 });
        }
        let mut files = Vec::new();
        match self.witness {
            Witness::SuccessorsHeader => {
                let header = Header { role: Role::Rolled, synced_lsn, ..file.header.behind() };
                file.next(&header, 0);
                let mut successor = SegmentFile::new(header);
                successor.done("after", 0);
                files.push(successor);
            }
            Witness::UnusedHeader => {
                files.push(SegmentFile::new(Header { role: Role::Rolled, synced_lsn, ..file.header.behind() }));
            }
            Witness::LaterRecord | Witness::Closed => {}
        }
        self.damage.apply(&mut file, record.start, record.end);
        let (mut run_number, newest) = (1, files.last().map_or(file.header, |last| last.header));
        if self.replaced {
            let header = Header { previous: 1, synced_lsn: 0, ..newest.recovery_behind() };
            let mut recovery = SegmentFile::new(header);
            let copy = recovery.done("copied", 0);
            let copied = recovery.bytes[copy].to_vec();
            recovery.sealed(&[&copied], &[(lsn, header.first_lsn)], 0);
            run_number = header.number;
            files.push(recovery);
        }
        files.insert(0, file);
        (Directory::store(run_number, &files), record.start)
    }
}

#[test]
fn a_record_counts_or_is_a_hole_or_is_damage_or_was_replaced() {
    let mut rows = Rows::<Facts>::new(&[
        ("counts", |facts| !facts.replaced && !facts.damaged()),
        ("hole", |facts| !facts.replaced && facts.damaged() && facts.place != Place::Below),
        ("damage", |facts| !facts.replaced && facts.damaged() && facts.place == Place::Below),
        ("replaced", |facts| facts.replaced),
    ]);
    for facts in Facts::all() {
        let (directory, at) = facts.lay_out();
        let row = rows.only(&facts);
        if row == "damage" {
            let said = refused(&directory, &facts, ErrorKind::Corrupt);
            let reason = facts.damage.reason();
            assert_eq!(said, format!("segment-00000001.keyonce is corrupt at byte {at}: {reason}"), "{facts:?}");
            continue;
        }
        let something_behind = facts.followed || matches!(facts.witness, Witness::Closed | Witness::SuccessorsHeader);
        let torn = row == "hole" && (something_behind || facts.damage.shows_a_tear());
        opens(&directory, &facts, |store, first| {
            let report = store.opened();
            if first {
                assert_eq!(report.torn, u64::from(torn), "{facts:?}: {report:?}");
                let clean = facts.witness == Witness::Closed && !facts.replaced && !facts.followed;
                assert_eq!(report.clean, clean && !torn, "{facts:?}: {report:?}");
            }
            let replaced = row == "replaced";
            let after = facts.witness == Witness::SuccessorsHeader && !replaced;
            let keys = [
                ("before", true),
                ("record", row == "counts"),
                ("behind", facts.followed && !replaced),
                ("after", after),
                ("copied", replaced),
            ];
            holds(store, &facts, &keys);
        });
    }
    rows.all_hit("one record");
}
