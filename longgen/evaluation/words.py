"""Plain English words for keys and word lists. None of them is part of another, so that a match is a match."""

from __future__ import annotations

import random

_ADJECTIVES = (
    "abrupt acidic ancient anxious bashful bitter bouncy breezy brittle careful charming cheerful clumsy coastal "
    "comical crooked crimson curious dainty daring dazzling decent delicate diligent distant dreary dusty eager "
    "earnest elegant enormous exotic faithful famous fearless feeble festive flimsy floral fluffy foolish forgetful "
    "fragile frantic frosty frugal gallant generous gigantic gloomy graceful grumpy hasty hollow honest humble "
    "idle immense jealous jolly jubilant juicy keen lavish lazy lively lonely loyal lucky mellow misty modest "
    "muddy narrow nimble noisy obedient opaque ordinary patient peaceful pensive playful polite precious prickly "
    "proud puzzled quaint quiet ragged rapid reckless remote restless rigid robust rugged rustic salty scarce "
    "serene shaggy shallow sincere sleepy slender sluggish smooth solemn spicy steady sturdy subtle sudden sullen "
    "swift tender thirsty thorough timid tranquil tricky upbeat vague valiant vivid weary wicked witty wobbly worried "
    "yearly zealous"
)
_NOUNS = (
    "acorn airport almond anchor anthem apricot archive armchair autumn avenue bagpipe balcony bandage barrel basket "
    "beacon beetle blanket blossom bottle boulder bracelet bridge bucket buffalo button cabbage cactus camera candle "
    "canyon carpet castle ceiling cello chapel cherry chimney circus cliff clover cobweb compass copper cottage "
    "cradle cricket crystal curtain cushion cyclone dagger daisy dentist desert diary dolphin donkey dragon drawer "
    "dungeon elbow elephant emerald engine envelope falcon feather fiddle flannel flute forest fossil fountain galaxy "
    "garlic giraffe glacier goblet gorilla granite guitar hamlet hammock harbor harvest hedgehog helmet hurdle "
    "iceberg insect island ivory jacket jaguar jewel jigsaw journal jungle kettle keyboard kitchen kitten ladder "
    "lagoon lantern lemon library lizard lobster locket magnet mammoth marble market meadow mirror mitten molasses "
    "monsoon mosaic muffin mustard napkin nectar needle nephew notebook nugget oasis ocean octopus orchard orchid "
    "oyster paddle panther parade parrot pebble pelican pencil pepper piano picnic pillow pioneer planet plaza pocket "
    "potato prairie pretzel pumpkin puppet pyramid quarry quartz quilt rabbit radish ravine ribbon riddle rocket "
    "saddle salmon sandal saucer scarf school shovel signal silver skeleton sparrow spider sponge squirrel stadium "
    "statue suitcase sunset tadpole teapot temple thimble thunder ticket tiger tornado tractor trumpet tulip tunnel "
    "turnip turtle tuxedo umbrella vacuum valley vanilla velvet village vinegar violin volcano voyage waffle wagon "
    "walnut walrus waterfall whistle willow window wizard wolf yogurt zebra zeppelin"
)


def adjectives() -> tuple[str, ...]:
    """All adjectives, in order."""
    return tuple(_ADJECTIVES.split())


def nouns() -> tuple[str, ...]:
    """All nouns, in order."""
    return tuple(_NOUNS.split())


def distinct_words(rng: random.Random, count: int) -> list[str]:
    """`count` different words: single ones as far as they go; otherwise all are compounds, as "humble-teapot"."""
    single = (*adjectives(), *nouns())
    if count <= len(single):
        return rng.sample(single, count)
    parts = 2
    while len(single) ** parts < count:
        parts += 1
    words = []
    for number in rng.sample(range(len(single) ** parts), count):
        chosen = []
        for _ in range(parts):
            number, index = divmod(number, len(single))
            chosen.append(single[index])
        words.append("-".join(chosen))
    return words


def key_word(rng: random.Random) -> str:
    """An adjective and a noun, as "humble-teapot"."""
    return f"{rng.choice(adjectives())}-{rng.choice(nouns())}"
