"""Sixty-four sentences of very different lengths, 5 to about 200 tokens: real input for the sentence encoder."""

# Two ways to say one thing. Each should be the nearest of all sentences to the other.
PARAPHRASES: tuple[tuple[str, str], ...] = (
    ("A cat is asleep on the windowsill.", "On the sill of the window a cat has dozed off."),
    ("The train to Lyon is late.", "Passengers for Lyon have to wait, because their train has not come in on time."),
    ("How do I reset my password?", "I forgot the password of my account and would like to choose a new one."),
    (
        "Bread needs time.",
        "Anyone who bakes bread learns to wait: the dough has to rest and rise for hours, first in the bowl and then "
        "in its tin, and hurrying it along with more yeast or a warmer kitchen only costs flavour.",
    ),
    ("The central bank raised interest rates.", "Borrowing became dearer after the bank of issue lifted its rate."),
    ("She broke her wrist while skiing.", "During a ski holiday she fractured the bones of her wrist."),
    ("It will rain all weekend.", "Expect showers on Saturday and Sunday; there will hardly be a dry hour."),
    (
        "Bees dance to tell each other where flowers are.",
        "When a honey bee comes home with nectar she performs a waggling run on the comb, whose angle and duration "
        "tell her sisters in which direction and how far away the blossoms stand.",
    ),
    ("Our team won the final in the last minute.", "A goal just before the whistle gave our side the cup final."),
    ("The museum is closed on Mondays.", "On Mondays visitors cannot enter the museum."),
    (
        "Vaccines train the immune system.",
        "A vaccine shows the body a harmless piece of a germ, so that its defences can practise and will recognise "
        "the real pathogen at once should it ever turn up.",
    ),
    ("Please turn the music down.", "Could you make that song a little quieter?"),
    (
        "A good knife must be sharp.",
        "Cooks say that a blunt blade is the dangerous one, since it slips off the onion instead of cutting into it; "
        "so keep your kitchen knives sharp.",
    ),
    ("The volcano erupted overnight.", "During the night lava and ash began to pour out of the volcano."),
)

# Everything else, in no order of length or subject.
OTHERS: tuple[str, ...] = (
    "Good morning!",
    "Mind the gap.",
    "Checkmate.",
    "Two lemons, please.",
    "Nobody answered the telephone.",
    "Gravity bends light.",
    "My grandmother keeps every letter she ever received in a biscuit tin under the stairs.",
    "The bridge is narrow.",
    "Octopuses have three hearts, and two of them stop beating whenever the animal swims.",
    "Paint the fence before the frost comes.",
    "The contract ends on the last day of June unless one of the parties gives notice in writing.",
    "Whales sing.",
    "A violin is carved from spruce and maple, and the thickness of its belly, tapped and scraped and tapped again, "
    "decides whether it will whisper or carry to the last row of the hall.",
    "He sold the farm and bought a small boat.",
    "The lift is out of order, so the piano will have to go up by the stairs.",
    "Tides follow the moon.",
    "Every prime number greater than three lies next to a multiple of six.",
    "The tomatoes on the balcony turned red in the same week in which we left for the coast, and the neighbour who "
    "watered them ate most of them, which was only fair.",
    "Glass is not a slow liquid, whatever the guide in the cathedral may tell you about the thick lower edge of the "
    "old panes; it was made uneven, and the glazier sensibly put the heavy side down.",
    "Where is the nearest pharmacy?",
    "Copper roofs turn green because the metal slowly reacts with air and rain until a thin crust covers it, and that "
    "crust then protects what lies beneath.",
    "Chess engines no longer lose to people.",
    "An orchestra tunes to the oboe, whose pitch is hard to adjust and easy to hear, and for a quarter of a minute "
    "the whole hall is one long note before anybody has played a bar of music.",
    "The judge postponed the hearing until both lawyers had read the new report.",
    "Salt lowers the freezing point of water, so the road stays wet at a few degrees of frost; in bitter cold it no "
    "longer helps, and then the town spreads grit instead.",
    "For three winters the two brothers worked in the same shipyard without exchanging a word, one painting hulls and "
    "the other fitting pipes, each eating his lunch at his own end of the quay, until a crane dropped a crate of "
    "oranges between them and both, on their knees among the rolling fruit, began to laugh.",
    "The old lighthouse was switched off in spring. A lamp on a steel pole does its work now, unattended, and the "
    "keeper's house is let to holidaymakers who complain that they cannot sleep because it is so quiet.",
    "To mend a puncture, take the wheel out, lever one side of the tyre over the rim and draw out the tube. Pump it "
    "up a little and listen, or hold it under water and look for bubbles. Roughen the place with sandpaper, spread "
    "the rubber solution thinly, wait until it no longer shines, press the patch on hard and dust it with chalk. "
    "Before the tube goes back, run your fingers along the inside of the tyre: the thorn is often still there.",
    "Sea ice forms, drifts, breaks and freezes together again. What a satellite sees as one white sheet is a crowd "
    "of floes that grind against each other, pile up into ridges higher than a house and leave dark cracks of open "
    "water, over which the air is suddenly so mild that it smokes. Seals breathe there, bears wait there, and a ship "
    "that finds such a lead may follow it for a day or be shut in within the hour.",
    "When the town library moved into the former slaughterhouse, many people shook their heads. The walls were tiled "
    "to the ceiling, rails still ran beneath the roof, and on damp days one thought one could smell what had been "
    "done there. The architects left the tiles and hung the lamps from the rails. Where the cattle once waited, "
    "children now lie on cushions and read; in the cold store, whose door is as thick as a mattress, the music "
    "section has found the quietest room in the county. The butcher who had worked there as an apprentice came to the "
    "opening, walked through everything twice, borrowed a cookery book, and said that it was the first time he had "
    "ever felt warm in that building.",
    "A computer keeps the time by counting the beats of a small crystal, and no two crystals beat alike. Left alone, "
    "the clocks of two machines drift apart by a second or so every few days, which is nothing to a person and an "
    "age to a database. So the machines ask others that know better. The answer takes a while to arrive, and by then "
    "it is old; the machine therefore notes when it asked and when it heard, supposes that the way there was as long "
    "as the way back, and corrects itself by the difference. It does not jump, for then some instants would happen "
    "twice, but runs a little faster or slower until it agrees. Where that is not good enough, in a power grid or an "
    "exchange, an aerial on the roof listens to satellites whose atomic clocks are in turn corrected from the ground. "
    "In the end everybody's noon is a matter of agreement.",
    "The recipe is simple: onions, butter, patience.",
    "Lost: one grey parrot, answers to Admiral, swears in Portuguese.",
    "Wind turbines stand still in a storm, because above a certain speed the load on the blades would be too great.",
    "The tailor measured twice.",
    "She reads the last page of a novel first, and has never once regretted it.",
)

SENTENCES: tuple[str, ...] = (*(sentence for pair in PARAPHRASES for sentence in pair), *OTHERS)
